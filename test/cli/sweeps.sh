#!/bin/bash
# ./bench: the rows of sweeps.
# shellcheck source=common.sh
. "${BASH_SOURCE[0]%/*}/common.sh"

bench() { # the rest of a ./bench command line, on the CPU; output in $dir/out, status in $status
  CUDA_VISIBLE_DEVICES='' timeout -k 5 $((2 * limit)) ./bench "$@" >"$dir/out" 2>&1 </dev/null
  status=$?
}
# rows FILE COUNT WORD...: that many rows, each with every word; on the CPU.
rows() {
  local file=$1 count=$2 wrong=""
  shift 2
  [ "$status" = 0 ] || wrong="exit status $status"
  touch "$file"
  for word in '"result"' '"command"' '"commit"' '"hardware"' "$@"; do
    [ "$(grep -c -- "$word" "$file")" = "$count" ] || wrong="$wrong; not $count rows with $word"
  done
  verdict "the rows of a sweep" "$wrong"
}
tiny_steps=(--steps 3 --window 2:3 --ranks 2)
bench --sweep depth --only 1,2 "${tiny_steps[@]}" --out "$dir/depth.jsonl" -- --seq 64 --batch 1 --profile
rows "$dir/depth.jsonl" 2 '"step_ms":[0-9]*\.[0-9]' '"ranks":2' '"peak_mib":[1-9]' '"steps_ms":\[[0-9.]*,[0-9.]*,[0-9.]*\]' \
  '"window":\[2,3\]' '"first_peak_mib"' '"date":"20'
[ "$(grep -c '"depth":\([12]\),.*"row":"\1"' "$dir/depth.jsonl")" = 2 ]
verdict "what a sweep varies is what ran" "$([ $? = 0 ] || echo "the depths are not in the rows' configurations")"

# A sweep that was interrupted goes on, and keeps what it has; --only replaces the rows that it names.
cp "$dir/depth.jsonl" "$dir/before.jsonl"
head -n 1 "$dir/before.jsonl" >"$dir/depth.jsonl"
bench --sweep depth --continue "${tiny_steps[@]}" --out "$dir/depth.jsonl" -- --seq 64 --batch 1 --profile
rows "$dir/depth.jsonl" 4
[ "$(head -n 1 "$dir/depth.jsonl")" = "$(head -n 1 "$dir/before.jsonl")" ]
verdict "--continue keeps the rows that are there" "$([ $? = 0 ] || echo "the first row was made again")"
# A row of another command or on other ranks is not what it is to go on with.
cp "$dir/depth.jsonl" "$dir/before.jsonl"
bench --sweep depth --continue --only 1,2 "${tiny_steps[@]}" --out "$dir/depth.jsonl" -- --seq 32 --batch 1 --profile
wrong=""
[ "$(grep -c 'depth [12], .*: .*depth.jsonl has it by another command, and it runs again' "$dir/out")$(grep -c '"seq":32,' "$dir/depth.jsonl")" = 22 ] || wrong="rows with other options stay"
bench --sweep depth --continue --only 2 --steps 3 --window 2:3 --ranks 1 --out "$dir/depth.jsonl" -- --seq 32 --batch 1 --profile
grep -q '"ranks":1,.*"row":"2"' "$dir/depth.jsonl" || wrong="$wrong; a row on other ranks stays"
verdict "--continue makes rows of another run again" "$wrong"
bench --sweep depth --continue --only 2 --steps 3 --window 3:3 --ranks 1 --out "$dir/depth.jsonl" -- --seq 32 --batch 1 --profile
wrong=""
grep -q '"row":"2",.*"window":\[3,3\]' "$dir/depth.jsonl" || wrong="a row of other steps stays"
sed -i '/"row":"2"/s/"name":"[^"]*"/"name":"another chip"/' "$dir/depth.jsonl"
bench --sweep depth --continue --only 2 --steps 3 --window 3:3 --ranks 1 --out "$dir/depth.jsonl" -- --seq 32 --batch 1 --profile
grep -q 'depth 2, .*: .* has it on other hardware, and it runs again' "$dir/out" || wrong="$wrong; a row of other hardware stays"
verdict "--continue makes rows of other steps and of other hardware again" "$wrong"
# A round of another command is no round of the row, and PyTorch's row stands beside what it was beside.
bench --sweep depth --only 1 --rounds 2 "${tiny_steps[@]}" --out "$dir/rounds.jsonl" -- --seq 64 --batch 1
wrong=""
[ "$(wc -l <"$dir/rounds.jsonl")" = 2 ] || wrong="not two rounds"
grep -m 1 '"row":"1"' "$dir/rounds.jsonl" | sed 's/"who":"fsdp.cu"/"who":"PyTorch"/' >"$dir/theirs"
cat "$dir/theirs" >>"$dir/rounds.jsonl"
bench --sweep depth --only 1 "${tiny_steps[@]}" --out "$dir/rounds.jsonl" -- --seq 64 --batch 1
[ "$(grep -c PyTorch "$dir/rounds.jsonl") $(wc -l <"$dir/rounds.jsonl")" = "1 3" ] || wrong="$wrong; the same again takes rows away"
bench --sweep depth --only 1 "${tiny_steps[@]}" --out "$dir/rounds.jsonl" -- --seq 32 --batch 1
[ "$(grep -c '"seq":32,' "$dir/rounds.jsonl") $(wc -l <"$dir/rounds.jsonl")" = "1 1" ] || wrong="$wrong; rows of other options stay beside it"
verdict "rows of one command stand together" "$wrong"
bench --sweep depth --only 1 --steps 3000 --timeout 1 --out "$dir/depth.jsonl"
verdict "no good row among those asked for is a failure" "$([ "$status" = 1 ] && grep -q "timed out" "$dir/out" || echo "exit status $status")"
# Files that are no files, and one that another sweep is writing.
mkfifo "$dir/fifo"
for out in /dev/null "$dir/fifo"; do
  bench --sweep depth --only 1 --out "$out"
  judge "rows to $out" "--out: $out" "no regular file"
done
(exec 9>"$dir/.held.jsonl.lock" && flock 9 && bench --sweep depth --only 1 --out "$dir/held.jsonl" && echo "$status" >"$dir/status")
status=$(cat "$dir/status")
judge "two sweeps with one file" "another run is writing held.jsonl"
FSDP_GRAD_ACCUM=3 bench --sweep depth --only 1 --out "$dir/held.jsonl"
judge "an option that no row would say" "FSDP_GRAD_ACCUM"
bench --sweep depth --only 1 --out "$dir/held.jsonl" -- --show-params
judge "an option that trains nothing" "--show-params"
bench --list --plots
judge "two actions" "--list and --plots"
bench --sweep depth --only 1 --warm 5 --out "$dir/held.jsonl"
judge "warming up for so long, on a CPU" "--warm"
bench --sweep attention --values 64 --timeout 5 --out "$dir/held.jsonl"
judge "a limit that nothing has" "--sweep attention" "--timeout"
if [ -w /dev/full ]; then
  ./bench --list >/dev/full 2>"$dir/out"
  status=$?
  judge "a list to a full disk" "standard output cannot be written"
fi

# What ./train refuses is said before a file is touched, and takes no row its result.
cp "$dir/before.jsonl" "$dir/depth.jsonl"
bench --sweep depth "${tiny_steps[@]}" --out "$dir/depth.jsonl" -- --momnets bf16
judge "options that every row refuses" "--sweep depth" "--momnets" "--moments"
verdict "refused options leave the file as it was" "$(cmp "$dir/before.jsonl" "$dir/depth.jsonl")"
bench --sweep fp8-loss "${tiny_steps[@]}" --out "$dir/refused.jsonl"
head -n 1 "$dir/refused.jsonl" >"$dir/first.jsonl"
bench --sweep fp8-loss "${tiny_steps[@]}" --out "$dir/refused.jsonl" -- --fp8-scaling row
wrong=""
grep -q '1, bf16, seed 1: the row that .*refused.jsonl has stays; now it is refused: --fp8-scaling row' "$dir/out" || wrong="nothing says that it is refused"
[ "$(grep -c '"result"' "$dir/refused.jsonl")$(grep -c '"fp8_scaling":"row"' "$dir/refused.jsonl")" = 21 ] || wrong="$wrong; not a row as it was and one anew"
head -n 1 "$dir/refused.jsonl" | cmp - "$dir/first.jsonl" >>"$dir/out" || wrong="$wrong; the first is another"
verdict "a row that is refused keeps its result" "$wrong"
# One that is interrupted before its last row leaves the rest as it was, and goes on with what it did not come to.
cp "$dir/depth.jsonl" "$dir/before.jsonl"
rows_before=$(wc -l <"$dir/before.jsonl")
CUDA_VISIBLE_DEVICES='' ./bench --sweep depth "${tiny_steps[@]}" --out "$dir/depth.jsonl" -- --seq 64 --batch 1 >"$dir/out" 2>&1 &
interrupted=$!
for ((i = 0; i < 400; i++)); do
  if grep -q '^depth 1,' "$dir/out"; then break; fi
  sleep 0.05
done
kill -TERM $interrupted
wait $interrupted
wrong=""
[ "$(wc -l <"$dir/depth.jsonl")" = "$rows_before" ] || wrong="$(wc -l <"$dir/depth.jsonl") rows of $rows_before are there"
grep -q '"row":"1".*"stale":true' "$dir/depth.jsonl" && wrong="$wrong; the first is told as one of before"
grep -q '"row":"8".*"stale":true' "$dir/depth.jsonl" || wrong="$wrong; the last is not"
bench --sweep depth --continue "${tiny_steps[@]}" --out "$dir/depth.jsonl" -- --seq 64 --batch 1
[ "$(grep -c stale "$dir/depth.jsonl") $(wc -l <"$dir/depth.jsonl")" = "0 4" ] || wrong="$wrong; --continue leaves some"
[ "$(grep -cxFf "$dir/before.jsonl" "$dir/depth.jsonl")" = 0 ] || wrong="$wrong; --continue takes old ones for its own"
verdict "a sweep that is interrupted loses no row, and goes on" "$wrong"

cp "$dir/depth.jsonl" "$dir/before.jsonl"
bench --sweep depth --only 3 "${tiny_steps[@]}" --out "$dir/depth.jsonl" -- --seq 64 --batch 1
rows "$dir/depth.jsonl" 4
[ "$(diff "$dir/before.jsonl" "$dir/depth.jsonl" | grep -c '^>')" = 1 ] && diff "$dir/before.jsonl" "$dir/depth.jsonl" | grep -q '^> .*"row":"4"'
verdict "--only makes the rows that it names anew" "$([ $? = 0 ] || echo "not the third row, or not it alone")"

bench --sweep knobs --only 1,4 "${tiny_steps[@]}" --out "$dir/knobs.jsonl" -- --seq 64 --batch 1
rows "$dir/knobs.jsonl" 2 '"exposed_gather_ms":[0-9]*\.[0-9]' '"ranks":2'
[ "$(grep -c '"row":"as it is".*"shard":"full"' "$dir/knobs.jsonl")$(grep -c '"row":"--shard hybrid:2".*"shard":"hybrid:2"' "$dir/knobs.jsonl")" = 11 ] ||
  [ "$(grep -c '"shard":"full".*"row":"as it is"' "$dir/knobs.jsonl")$(grep -c '"shard":"hybrid:2".*"row":"--shard hybrid:2"' "$dir/knobs.jsonl")" = 11 ]
verdict "a knob that a row names is what ran" "$([ $? = 0 ] || echo "the options are not in the rows' configurations")"

# PyTorch's rows: its process prints a line a row. Here it is one that ends in its second, and the third runs in another.
mkdir "$dir/bin"
cat >"$dir/bin/python3" <<'END'
#!/bin/bash
while [ $# -gt 0 ]; do
  [ "$1" != --rows ] || rows=$2
  shift
done
tag=$(sed -n 's/^ *"tag": "\(.*\)"$/\1/p' "$rows" | head -n 1)
echo "{\"ok\":true,\"tag\":\"$tag\",\"result\":{\"step_ms\":7.5},\"steps_ms\":[7.5]}"
exit 1
END
chmod +x "$dir/bin/python3"
PATH="$dir/bin:$PATH" bench --sweep depth --only 1,3,4 --peer "${tiny_steps[@]}" --out "$dir/peer.jsonl" -- --seq 64 --batch 1
[ "$(grep -c '"step_ms":7.5.*"row":"[18]".*"who":"PyTorch"' "$dir/peer.jsonl")$(grep -c '"error":"exit status 1".*"row":"4".*"who":"PyTorch"' "$dir/peer.jsonl")" = 21 ]
verdict "PyTorch goes on behind a row in which its process ends" "$([ $? = 0 ] || echo "not two rows of PyTorch's and an error")"
# A sweep without --peer makes our rows anew and leaves PyTorch's, which no longer count beside ours of other options.
PATH="$dir/bin:$PATH" bench --sweep seq --peer "${tiny_steps[@]}" --out "$dir/seq.jsonl" -- --batch 1
peers() { grep '"step_ms":7.5[,}].*"who":"PyTorch"' "$dir/seq.jsonl"; }
mine() { grep '"who":"fsdp.cu"' "$dir/seq.jsonl"; }
peers=$(peers) mine=$(mine) wrong=""
[ -n "$peers" ] || wrong="no row of PyTorch's to begin with"
bench --sweep seq "${tiny_steps[@]}" --out "$dir/seq.jsonl" -- --batch 1
[ "$(peers)" = "$peers" ] || wrong="$wrong; PyTorch's rows are not what they were"
[ "$(mine | wc -l)$(grep -cxF "$mine" "$dir/seq.jsonl")" = 30 ] || wrong="$wrong; ours are not three new ones"
sed -i '/"who":"PyTorch"/ s/"result":{[^}]*}/"error":"OOM"/' "$dir/seq.jsonl"
bench --sweep seq "${tiny_steps[@]}" --out "$dir/seq.jsonl" -- --batch 1
[ "$(grep -c '"error":"OOM".*"who":"PyTorch"' "$dir/seq.jsonl")" = "$(wc -l <<<"$peers")" ] || wrong="$wrong; those that had no room go"
bench --sweep seq "${tiny_steps[@]}" --out "$dir/seq.jsonl" -- --batch 2
[ "$(mine | wc -l)$(grep -c '"who":"PyTorch"' "$dir/seq.jsonl")" = 30 ] || wrong="$wrong; PyTorch's stay beside ours of another batch"
verdict "a sweep without --peer keeps PyTorch's rows" "$wrong"
printf '#!/bin/bash\necho "ModuleNotFoundError: No module named torch"\nexit 1\n' >"$dir/bin/python3"
PATH="$dir/bin:$PATH" bench --sweep depth --continue --only 1,3,4 --peer "${tiny_steps[@]}" --out "$dir/peer.jsonl" -- --seq 64 --batch 1
[ "$(grep -c '"step_ms":7.5[,}].*"who":"PyTorch"' "$dir/peer.jsonl")$(grep -c '"error":"ModuleNotFoundError' "$dir/peer.jsonl")" = 21 ]
verdict "--continue keeps what is good and runs what failed" "$([ $? = 0 ] || echo "not so")"
# How many steps there are the corpus says to ours: both count those from the fifth on, under one schedule.
PATH="$dir/bin:$PATH" bench --sweep class --only 1 --peer --ranks 2 --out "$dir/class.jsonl"
steps=$(sed -n 's/.*"steps":\([0-9]*\),.*"who":"fsdp.cu".*/\1/p' "$dir/class.jsonl")
wrong=""
grep -q '"who":"fsdp.cu","window":\[5,'"$steps"'\]' "$dir/class.jsonl" || wrong="not all of ours from the fifth on"
grep -q -- "--steps $steps --warmup $((steps / 10)) --first 5 --last $steps .*\"who\":\"PyTorch\"" "$dir/class.jsonl" || wrong="$wrong; PyTorch is told something else"
verdict "the window of a row that runs over epochs" "$wrong"
PATH="$dir/bin:$PATH" bench --sweep class --only 1 --ranks 2 --window 6:800 --out "$dir/class.jsonl"
verdict "a window that the epochs do not reach" "$(grep -q '"error":"the run ended with step .* before step 800 of the window"' "$dir/class.jsonl" || echo "no error says so")"
PATH="$dir/bin:$PATH" bench --sweep depth --only 1 --peer "${tiny_steps[@]}" --out "$dir/none.jsonl" -- --seq 64 --batch 1
grep -q '"error":"ModuleNotFoundError: No module named torch".*"who":"PyTorch"' "$dir/none.jsonl"
verdict "a machine without PyTorch" "$([ $? = 0 ] || echo "no row says why")"
rm -f "$dir/none.jsonl"

# Every sweep runs here, with tiny shapes, or is planned: its first row and its last.
all=$(./bench --list | sed -n 's/^| \([a-z0-9-]*\) .*| *\([0-9][0-9]*\) | *[-0-9]* | *[-0-9]* |$/\1:\2/p')
verdict "the list of sweeps" "$([ "$(wc -w <<<"$all")" -gt 15 ] || echo "it has $(wc -w <<<"$all") in a form that is read here")"
for sweep in $all; do
  options=("${tiny_steps[@]}")
  [ "${sweep%:*}" != scale ] || options=() # planned: it has no steps to count
  bench --sweep "${sweep%:*}" --only "1,${sweep#*:}" "${options[@]}" --out "$dir/all-${sweep%:*}.jsonl"
  wrong=""
  [ "$status" = 0 ] || wrong="exit status $status"
  head -n 1 "$dir/all-${sweep%:*}.jsonl" | grep -q '"step_ms":[0-9]' || wrong="$wrong; no step_ms in the first row"
  tail -n 1 "$dir/all-${sweep%:*}.jsonl" | grep -q "\"number\":${sweep#*:}," || wrong="$wrong; no row ${sweep#*:}"
  ! grep -q '"error"' "$dir/all-${sweep%:*}.jsonl" || wrong="$wrong; a row has an error"
  verdict "the sweep ${sweep%:*}" "$wrong"
done
bench --sweep depth --only 2,8 --gpu h200 --ranks 2 --out "$dir/planned.jsonl"
rows "$dir/planned.jsonl" 2 '"planned":true' '"step_ms":[1-9]' '"peak_mib":[1-9]' '"name":"H200"'
root=$PWD
mkdir "$dir/plans"
for of in "a100 2" "h200 4" "h200 2"; do
  (cd "$dir/plans" && timeout -k 5 $limit "$root/bench" --sweep meta-init --gpu "${of% *}" --ranks "${of#* }") >"$dir/out" 2>&1 </dev/null
done
for of in "" "--gpu h200" "--gpu a100"; do
  # shellcheck disable=SC2086 # an option and its value
  (cd "$dir/plans" && timeout -k 5 $limit "$root/bench" --sweep scale --only 1 $of) >"$dir/out" 2>&1 </dev/null
done
verdict "only the plan that tables read is under its name" "$([ "$(cd "$dir/plans/results" && echo *)" = "meta-init-planned-a100-2gpu.jsonl meta-init-planned-h200-4gpu.jsonl meta-init-planned.jsonl scale-planned-a100.jsonl scale-planned.jsonl" ] || ls "$dir/plans/results")"
wrong=""
grep -q -- '--gpu a100 .*"name":"A100' "$dir/plans/results/scale-planned-a100.jsonl" || wrong="the rows are another chip's"
! cmp -s <(grep -o '"step_ms":[0-9.]*' "$dir/plans/results/scale-planned.jsonl") <(grep -o '"step_ms":[0-9.]*' "$dir/plans/results/scale-planned-a100.jsonl") || wrong="$wrong; a step takes as long as on an H200"
verdict "a sweep that is only planned is planned for the chip of --gpu" "$wrong"
bench --sweep scale --gpu a100 --ranks 2
judge "ranks of rows that say theirs" "--sweep scale" "--ranks"
# --check is about every document that is named, before it or behind it.
printf '# a table\n\n<!-- table depth -->\nold\n<!-- end -->\n' >"$dir/notes.md"
wrong=""
for words in "--notes $dir/notes.md --check" "--notes --check $dir/notes.md" "--check --notes $dir/notes.md" "--notes README.md --check $dir/notes.md"; do
  # shellcheck disable=SC2086 # options and files
  bench $words
  [ "$status" = 1 ] && grep -q "^$dir/notes.md:4: table depth is not what results has" "$dir/out" || wrong="$wrong; not with $words"
done
grep -q '^old$' "$dir/notes.md" || wrong="$wrong; it is written"
verdict "--check tells what differs in its documents" "$wrong"
bench --notes --check
judge "a check of no document" "--notes" "NOTES.md"
bench --plot
judge "a picture of nothing" "--plot: name a file"
bench --notes NOTES.md --gpu a100 --ranks 2
judge "a chip for what is no sweep" "--gpu" "--sweep"
bench --sweep losses --gpu h200 --ranks 1 --out "$dir/losses.jsonl"
[ "$(grep -c '"note":"not planned: .*CPU.*"row":"CPU, fp32"' "$dir/losses.jsonl")$(grep -c '"result":.*"row":"CPU, fp32"' "$dir/losses.jsonl")$(grep -c '"result":.*"row":"GPU' "$dir/losses.jsonl")" = 102 ]
verdict "a row on the CPU is not planned as if it were on the GPU" "$([ $? = 0 ] || echo "not a note and two plans")"
bench --sweep targets --only 2,7 --gpu h200 --ranks 2 --out "$dir/targets.jsonl"
rows "$dir/targets.jsonl" 2 '"target":{.*"before":[0-9].*"figure":"step_ms".*"goal":[0-9]'
grep -q '^| model .*| before | goal | aim | PyTorch | *ours |' <(tr -s ' ' <"$dir/out")
verdict "a sweep of targets ends with them" "$([ $? = 0 ] || echo "no such table")"

# On two GPUs that are not there: a ./train whose log says where the step went.
mkdir "$dir/gpus"
cp setup.sh probe.sh "$dir/gpus"
cat >"$dir/gpus/train" <<'END'
#!/bin/bash
if [ "$1" = --hardware ]; then
  [ -e cpu ] && echo '{"name":"a CPU","gpus":0}' || echo '{"name":"NVIDIA H200","gpus":2}'
  exit
fi
echo "$*" >arguments
while [ "$1" != --log ]; do shift; done
cat >"$2.$$" <<'LOG'
{"config":{"attn":"dense"}}
{"step":1,"step_ms":300.0,"loss":1.0,"tokens_per_sec":200.0}
{"step":2,"step_ms":300.0,"loss":1.0,"tokens_per_sec":200.0}
{"profile_ms":{},"host_ms":1.0,"shares":{"products_ms":200.0,"products_limit_ms":160.0,"waiting_ms":3.5}}
LOG
mv "$2.$$" "$2"
END
chmod +x "$dir/gpus/train"
(cd "$dir/gpus" && timeout -k 5 $limit "$root/bench" --sweep step-shares --only 1 --steps 2 --window 1:2 --warm 0 \
  --out rows.jsonl >"$dir/out" 2>&1 </dev/null)
status=$?
rows "$dir/gpus/rows.jsonl" 1 '"products_ms":200' '"products_limit_ms":160' '"waiting_ms":3.5' '"command":".*--profile'
grep -q '| 200 | 160 | 1.25 | 3.50 |' <(tr -s ' ' <"$dir/out")
verdict "a sweep tells where a step went" "$([ $? = 0 ] || echo "not in its table")"
# Two sweeps of one name may run at once: each has files of its own, which its rows do not name.
wrong=""
grep -qE -- '--log build/bench/step-shares-2-ranks-1-[0-9]+\.jsonl' "$dir/gpus/arguments" || wrong="the log is not this process's own"
grep -q '"command":"[^"]*--log build/bench/step-shares-2-ranks-1\.jsonl"' "$dir/gpus/rows.jsonl" || wrong="$wrong; the row's command has another"
[ -z "$(ls -A "$dir/gpus/build/bench")" ] || wrong="$wrong; files are left"
verdict "a row's files are its process's own" "$wrong"
touch "$dir/gpus/cpu" # whose traces are no results
(cd "$dir/gpus" && timeout -k 5 $limit "$root/bench" --sweep trace --only 1 --steps 2 --window 1:2 --out trace.jsonl \
  >"$dir/out" 2>&1 </dev/null)
wrong=""
grep -qE -- '--trace build/bench/trace-2-ranks-1-[0-9]+-trace\.json' "$dir/gpus/arguments" || wrong="the trace is not this process's own"
grep -q '"command":"[^"]*--trace build/bench/trace-2-ranks-1-trace\.json' "$dir/gpus/trace.jsonl" || wrong="$wrong; the row's command has another"
verdict "and so is the trace of the sweep on a CPU" "$wrong"
bench --sweep mlp-1024 --dry-run --peer --gpu h200 --ranks 2
wrong=""
grep -q '^2 +autocast(bf16): mpirun -np 1 ./train .*--autocast bf16' "$dir/out" || wrong="no command of ours"
grep -q 'PyTorch: .*--nproc_per_node=2 peers/torch_fsdp.py .*--arch mlp .*--reduce-dtype bf16' "$dir/out" || wrong="$wrong; no command of PyTorch's"
verdict "--dry-run says what would run" "$wrong"
bench --list --gpu a100 --ranks 2
wrong=""
[ "$status" = 0 ] || wrong="--list: exit status $status"
bench --sweep fp8 --gpu a100 --ranks 2 --out "$dir/a100.jsonl"
[ "$(grep -c '"result":{.*"row":"bf16"' "$dir/a100.jsonl")$(grep -c '"error":".* has no fp8' "$dir/a100.jsonl")" = 15 ] || wrong="$wrong; not one plan and five refusals"
verdict "a chip that cannot run every row" "$wrong"
bench --sweep fp8 --dry-run --peer --gpu h200 --ranks 2
wrong=""
grep -A1 '^3 --matmul-dtype fp8' "$dir/out" | grep -q 'PyTorch: .*--matmul-dtype fp8 --fp8-scaling row' || wrong="no fp8 beside fp8"
! grep -A1 '^1 bf16: ' "$dir/out" | grep 'PyTorch: .*fp8' || wrong="$wrong; fp8 beside bf16"
! grep -A1 '^5 .*--save-dtype fp8: ' "$dir/out" | grep PyTorch || wrong="$wrong; PyTorch beside what it cannot do"
bench --sweep precision --dry-run --peer --gpu h200 --ranks 2
grep -A1 '^9 fp8, dense: .*--matmul-dtype fp8' "$dir/out" | grep -q 'PyTorch: .*--matmul-dtype fp8' || wrong="$wrong; not in precision's row"
verdict "PyTorch is told what is in fp8" "$wrong"
bench --sweep fp8 --only 1 --dry-run --peer --gpu h200 --ranks 2 -- --wrap auto --rope-base 1000 --replicate-below 65536
steps=$(sed -n 's/^1 .* --steps \([0-9]*\) .*/\1/p' "$dir/out")
wrong=""
grep -q "PyTorch: .* --steps $steps --warmup $((steps / 10)) " "$dir/out" || wrong="another schedule than ours"
for told in --rope-base.1000 --replicate-below.65536 --wrap-min-params.100000000 --bucket-mb.0; do
  grep -q "PyTorch: .* $told" "$dir/out" || wrong="$wrong; it is not told $told"
done
bench --sweep fp8,class --dry-run --peer --gpu h200 --ranks 2 -- --wrap auto --tie-embeddings --freeze head
for option in $(grep -o 'torch_fsdp.py .*' "$dir/out" | grep -o -- ' --[a-z0-9-]*' | sort -u); do
  grep -qE -- "\"(--)?${option#--}\"" peers/torch_fsdp.py || wrong="$wrong; it has no $option"
done
verdict "PyTorch is told what it has, and has what it is told" "$wrong"
wrong=""
for option in "--clip-norm inf" "--attn nsa" "--global-batch 7" "--val-every 5" "--on-nan skip"; do
  # shellcheck disable=SC2086 # an option and its value
  bench --sweep depth --only 1 --dry-run --peer --gpu h200 --ranks 2 -- $option
  grep -q "^1 .* $option " "$dir/out" && ! grep -q PyTorch "$dir/out" || wrong="$wrong; it runs beside $option"
done
PATH="$dir/bin:$PATH" bench --sweep depth --only 1 --peer "${tiny_steps[@]}" --out "$dir/none.jsonl" -- --clip-norm inf
grep -q '"no_peer":"PyTorch has no --clip-norm inf"' "$dir/none.jsonl" || wrong="$wrong; the row does not say why"
rm -f "$dir/none.jsonl"
verdict "no PyTorch beside what it cannot follow" "$wrong"
wrong=""
for with in "depth --gpu h200 --ranks 2" "depth" "losses"; do
  # shellcheck disable=SC2086 # a sweep and its options
  bench --sweep $with --only 1 --window 30:40 --dry-run
  grep -qE -- '^1 .* --steps (4[0-9]|[5-9][0-9]|1[5-9][0-9]) ' "$dir/out" || wrong="$wrong; not for --sweep $with"
done
verdict "a window has as many steps as it needs" "$wrong"
# Of a step of some 300 ms 20 count, and of one of some 4 ms a second's.
bench --sweep targets --only 1,7 --dry-run --peer --gpu h200 --ranks 2
mapfile -t counted < <(sed -n 's/.*PyTorch: .* --first \([0-9]*\) --last \([0-9]*\).*/\1 \2/p' "$dir/out" | awk '{ print $2 - $1 + 1 }')
wrong=""
[ "${#counted[@]}" = 2 ] || wrong="not two rows"
[ "${counted[0]}" = 20 ] || wrong="$wrong; ${counted[0]} steps of rope count"
[ "${counted[1]:-0}" -gt 200 ] && [ "${counted[1]:-0}" -lt 300 ] || wrong="$wrong; ${counted[1]} steps of m7c count"
verdict "a median is of a second, where 20 steps take less" "$wrong"
bench --sweep depth --window 20:40 --steps 30
judge "a window that ends behind --steps" "--window 20:40" "--steps"
bench --sweep collectives --values 1,3 --ranks 3 --out "$dir/collectives.jsonl"
rows "$dir/collectives.jsonl" 4 '"ms":[0-9]*\.[0-9]' '"ranks":3' '"command":"./bench --sweep collectives'
bench --sweep collectives --ranks 1 --out "$dir/none.jsonl"
judge "collectives of one rank" "--ranks 2"
verdict "no rows, no file" "$([ ! -e "$dir/none.jsonl" ] || echo "an empty file is left")"
bench --sweep collectives --steps 5
judge "steps of what has none" "--sweep collectives" "--steps"
bench --sweep collectives --continue
judge "going on with what is one run" "--sweep collectives" "--continue"
echo "not rows" >"$dir/mine.txt"
bench --sweep collectives --values 1 --out "$dir/mine.txt"
judge "rows over a file of something else" "$dir/mine.txt" "not overwritten"
verdict "a file of something else stays" "$(grep -q "not rows" "$dir/mine.txt" || echo "it is gone")"
bench --sweep kernels --values 64
judge "values of what has a list of shapes" "--sweep kernels" "--values"
bench --sweep depth --seq 64
judge "an option of ./train before --" "--seq is an option of ./train" "behind --"
bench --sweep depth --sqe 64
judge "an option of nobody's" "--sqe" "see ./bench --help"
for own in "depth -- --depth 3" "depth -- --depth=3" "knobs -- --fuse 0"; do
  # shellcheck disable=SC2086 # a sweep, an option and its value
  bench --sweep $own --out "$dir/none.jsonl"
  judge "an option that rows differ in, $own" "behind --: it is what rows of --sweep ${own%% *} differ in"
done
bench --sweep attention --ranks 2
judge "ranks of what runs in one process" "--sweep attention" "--ranks"
bench --sweep attention --ranks 1 --values 64 --out "$dir/attention.jsonl"
rows "$dir/attention.jsonl" 4 '"attention"'
bench --sweep attention --values 32 --out "$dir/attention.jsonl"
rows "$dir/attention.jsonl" 8 '"attention"'
bench --sweep attention --values 64 --out "$dir/attention.jsonl"
verdict "--values makes the rows that it names anew, in their places" \
  "$([ "$(grep -o '"T":[0-9]*' "$dir/attention.jsonl" | uniq -c | tr -d '\n ')" = '4"T":644"T":32' ] || cat "$dir/attention.jsonl")"
sed -i '/"T":32/s/"gpus":[0-9]*/"gpus":7/' "$dir/attention.jsonl"
bench --sweep attention --values 64 --out "$dir/attention.jsonl"
rows "$dir/attention.jsonl" 4 '"attention"'
verdict "rows of another machine leave the file, and that is said" \
  "$(grep -q "left out: 4 rows of another machine" "$dir/out" || cat "$dir/out")"
bench --sweep collectives -- --seq 64
judge "options for a ./train that does not run" "--sweep collectives" "--"
for own in "--steps 3" --steps=3 "--log $dir/none.jsonl" "--gpu a100" "--world 2" --plan "--device gpu"; do
  # shellcheck disable=SC2086 # an option and its value
  bench --sweep depth --only 1 --dry-run -- $own
  judge "behind --, what a row is told by the sweep: $own" "$(cut -d= -f1 <<<"${own% *}") behind --"
done
bench --sweep knobs --only 1000
judge "a row that there is not" "--only 1000" "knobs"
# One of another sweep is as it was too; and so is one of this sweep, if it is broken off.
cp "$dir/depth.jsonl" "$dir/before.jsonl"
bench --sweep attention --values 64 --out "$dir/depth.jsonl"
judge "timings over the rows of another sweep" "$dir/depth.jsonl" "--sweep attention" "not overwritten"
bench --sweep kernels --out "$dir/collectives.jsonl"
judge "timings over other timings" "$dir/collectives.jsonl" "--sweep kernels" "not overwritten"
bench --summary "$dir/depth.jsonl" --json "$dir/mine.txt"
judge "a summary over a file of something else" "--json $dir/mine.txt" "not overwritten"
bench --summary "$dir/depth.jsonl" --json "$dir/nowhere/summary.json"
judge "a summary to no directory" "$dir/nowhere/summary.json: there is no directory $dir/nowhere"
verdict "nothing is compared for it" "$(! grep -q "speed-up over" "$dir/out" || echo "it is")"
bench --plot "$dir/depth.jsonl" --out "$dir/../${dir##*/}/depth.jsonl"
judge "a picture over its rows" "--out" "depth.jsonl" "ends in .svg"
echo "not rows" >"$dir/mine.svg"
bench --plot "$dir/depth.jsonl" --out "$dir/mine.svg"
judge "a picture over a file of something else" "--out $dir/mine.svg" "not overwritten"
verdict "none of them is touched" "$(cmp "$dir/before.jsonl" "$dir/depth.jsonl"; grep -q "not rows" "$dir/mine.txt" || echo "mine.txt is gone")"
cp "$dir/collectives.jsonl" "$dir/before.jsonl"
timeout -s INT -k 5 2 ./bench --sweep collectives --values 64,256 --ranks 2 --out "$dir/collectives.jsonl" >"$dir/out" 2>&1 </dev/null
verdict "rows stay when a timing is broken off" "$(cmp "$dir/before.jsonl" "$dir/collectives.jsonl")"
cp "$dir/attention.jsonl" "$dir/before.jsonl"
bench --sweep attention --values 1073741824 --out "$dir/attention.jsonl"
verdict "rows stay when nothing could be timed" "$([ "$status" = 1 ] || echo "exit status $status"; cmp "$dir/before.jsonl" "$dir/attention.jsonl")"
bench --sweep attention --values 1073741824 --out "$dir/large.jsonl"
wrong=""
grep -q '"error":"' "$dir/large.jsonl" || wrong="there was room"
bench --sweep attention --values 64 --out "$dir/large.jsonl"
verdict "rows for which there was no room are replaced" "${wrong:-$(grep -c '"result"' "$dir/large.jsonl" | grep -vx 4)}"
bench --sweep collectives --values 0
judge "a value of nothing" "--values"
bench --sweep nothing
judge "a sweep that there is not" "--sweep nothing" "mlp-1024"
bench --sweep depth --window 5
judge "half a window" "--window 5"
bench --sweep depth --gpu h200
judge "a chip that is not here" "--gpu" "--ranks"
bench --sweep depth --gpu h200 --ranks 2 --peer
judge "PyTorch on a chip that is not here" "--gpu h200" "PyTorch"
for of_runs in "--steps 3" "--window 1:2" "--rounds 2" "--warm 1"; do
  # shellcheck disable=SC2086 # an option and its value
  bench --sweep depth --gpu h200 --ranks 2 $of_runs
  judge "of a run, for a chip that is not here: $of_runs" "${of_runs% *} with --gpu h200" "planned"
done
bench --sweep attention --gpu h200 --ranks 2
judge "what has no plan" "--sweep attention" "plan"
mkdir "$dir/dies"
# shellcheck disable=SC2016 # its own process
printf '#!/bin/sh\nkill -9 $$\n' >"$dir/dies/mpirun"
chmod +x "$dir/dies/mpirun"
PATH="$dir/dies:$PATH" bench --sweep depth --only 1 "${tiny_steps[@]}" --out "$dir/dead.jsonl" -- --seq 64 --batch 1
log=$(sed -n 's/.*"error":"killed by signal 9; see \([^"]*\)".*/\1/p' "$dir/dead.jsonl")
verdict "a run that dies without a word leaves a log, and the row says where" "$([ -f "$log" ] || echo "no log is named: $(cat "$dir/dead.jsonl")")"
bench --sweep depth --out /nonexistent/rows.jsonl
judge "rows that cannot be written" "/nonexistent/rows.jsonl" "no directory"
bench --sweep seq --out "$dir/depth.jsonl"
judge "another sweep's rows" "$dir/depth.jsonl" "--sweep seq"
echo "not rows" >"$dir/text"
bench --sweep seq --out "$dir/text"
judge "a file of something else" "$dir/text" "not overwritten"

done_testing

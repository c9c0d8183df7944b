#!/bin/bash
# What the programs do with bad input: under mpirun with two ranks each mistake must give exactly one line of ours
# (`error: ...`) that names the culprit, and end all ranks with a non-zero status within 20 seconds. And that the
# options which do something else than training do it. The last line is for test/run: RESULT passed failed skipped.
cd "$(dirname "$0")/.." || exit
# shellcheck source=../setup.sh disable=SC1091
. ./setup.sh env 2
unset "${!FSDP_@}" # options of whoever runs the tests
dir=$(mktemp -d) || exit # without one the files below would lie in /
trap 'rm -rf "$dir"' EXIT
passed=0
failed=0
skipped=0
limit=$([ "${SAN-}" = 1 ] && echo 200 || echo 20) # ten times as slow with sanitizers
small=(--device cpu --preset tiny --seq 64 --batch 1 --steps 2)

verdict() { # NAME, then what is wrong (nothing if all is well)
  if [ -z "$2" ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "FAILED: $1: $2"
    sed 's/^/    /' "$dir/out" | head -n 20
  fi
}

mpi() { # the rest of an mpirun command line; output in $dir/out, status in $status, seconds in $took
  local start=$SECONDS
  # shellcheck disable=SC2086 # a list of flags
  timeout -k 5 $limit mpirun $MPIRUN_FLAGS "$@" >"$dir/out" 2>&1 </dev/null
  status=$?
  took=$((SECONDS - start))
}

judge() { # NAME WORD...: the output must be one error line that holds every word
  local name=$1 wrong="" lines word
  shift
  lines=$(tr -d '\r' <"$dir/out" | grep -a '^error: ')
  if [ "$status" = 0 ]; then wrong="exit status 0"; fi
  if [ "$status" = 124 ] || [ "$status" = 137 ]; then wrong="still running after $took s"; fi
  if [ "$(printf '%s' "$lines" | grep -c '')" != 1 ]; then
    wrong="$wrong; $(printf '%s' "$lines" | grep -c '') lines begin with 'error: ', not one"
  fi
  for word in "$@"; do
    [[ $lines == *"$word"* ]] || wrong="$wrong; the error does not name '$word'"
  done
  if grep -aqE 'terminate called|Segmentation fault|core dumped|internal error' "$dir/out"; then wrong="$wrong; it crashed"; fi
  verdict "$name" "${wrong#; }"
}

# bad NAME 'WORD|WORD...' OPTION...: two ranks, the small run with these options besides.
bad() {
  local name=$1 words
  IFS='|' read -r -a words <<<"$2"
  shift 2
  mpi -np 2 ./train "${small[@]}" "$@"
  judge "$name" "${words[@]}"
}

# good NAME WORD OPTION...: one process without mpirun; exit status 0 and the word in what it prints.
good() {
  local name=$1 word=$2 wrong=""
  shift 2
  timeout -k 5 $limit ./train "$@" >"$dir/out" 2>&1 </dev/null
  status=$?
  [ "$status" = 0 ] || wrong="exit status $status"
  grep -aqF -- "$word" "$dir/out" || wrong="$wrong; '$word' is not in the output"
  verdict "$name" "${wrong#; }"
}

# --------------------------------------------------------------------------------------------------------- options
bad "unknown option" "--dmi|--dim|--help" --dmi 64
bad "stray argument" "stray" stray
bad "value that is no number" "--dim abc|1048576" --dim abc
bad "value out of range" "--beta2 1.5" --beta2 1.5
mpi -np 2 ./train --device cpu --preset huge
judge "unknown preset" "--preset huge" "tiny"
bad "option without a value" "--depth" --depth
bad "world without plan" "--world|--plan" --world 8
bad "gpu without plan" "--gpu|--plan" --gpu h200
bad "unknown gpu" "--gpu h2000|h200" --plan --gpu h2000
bad "an answer to NaN that there is not" "--on-nan ignore|skip:K" --on-nan ignore
bad "no steps to skip" "--on-nan skip:0" --on-nan skip:0
bad "a step skipped that is applied by then" "--on-nan skip|--optimizer-in-backward" --on-nan skip --optimizer-in-backward 1 --clip 0
bad "a timeout that is none" "--timeout -1" --timeout -1
bad "missing file of options" "--config $dir/none.toml" --config "$dir/none.toml"
echo 'dmi = 3' >"$dir/bad.toml"
bad "unknown name in a file of options" "dmi|dim" --config "$dir/bad.toml"
bad "a file of options without a name" "--config ''|file name" --config ''
bad "a device for a file of options" "--config /dev/zero|not a regular file" --config /dev/zero
mkfifo "$dir/fifo"
bad "a FIFO for a file of options" "--config $dir/fifo|not a regular file" --config "$dir/fifo"
head -c 2000000 /dev/zero | tr '\0' k >"$dir/bad.toml"
bad "a huge file of options" "--config $dir/bad.toml|larger than 1 MiB" --config "$dir/bad.toml"
head -c 1000000 /dev/zero | tr '\0' k >"$dir/bad.toml"
echo ' = 3' >>"$dir/bad.toml"
bad "a huge name in a file of options" "--config $dir/bad.toml:1|unknown option 'kkk" --config "$dir/bad.toml"
FSDP_DIM=abc bad "a variable that is no number" "FSDP_DIM=abc|1048576"
FSDP_DIM=abc good "the command line wins over a variable" "step" "${small[@]}" --dim 64
echo 'steps = 4' >"$dir/steps.toml"
FSDP_CONFIG=$dir/steps.toml FSDP_DEPTH=1 FSDP_TF32=0 FSDP_DPETH=3 good "options from the environment" "4 steps" "${small[@]:0:6}"
verdict "a variable that is no option is named" "$(grep -q 'note: .* FSDP_DPETH, .*did you mean FSDP_DEPTH' "$dir/out" || echo "it is not")"
verdict "a variable sets an option" "$(grep -q ' in 3 units' "$dir/out" || echo "it does not")"
bad "heads that do not divide dim" "dim|100|heads|3" --dim 100 --heads 3 --kv-heads 1
bad "kv-heads that do not divide heads" "heads|4|kv-heads|3" --dim 64 --heads 4 --kv-heads 3
bad "log that cannot be written" "--log $dir/none/log" --log "$dir/none/log"
bad "groups that do not divide the ranks" "--shard hybrid:3|2 ranks" --shard hybrid:3
bad "a way to shard that there is not" "--shard some|full|hybrid:K" --shard some
bad "no limit that there is" "--limit-all-gathers 0|64|off" --limit-all-gathers 0
bad "a limit where all stay" "--limit-all-gathers" --shard grad --limit-all-gathers 3
bad "resharding what stays whole" "--shard none|--reshard-after-forward 1" --shard none --reshard-after-forward 1
bad "sizes of units without auto" "--wrap auto" --wrap-min-params 5
bad "AdamW in the backward pass with clipping" "--optimizer-in-backward 1|--clip 0" --optimizer-in-backward 1
bad "attention kept where it is kept anyway" "--keep-attention 1|--recompute" --keep-attention 1 --recompute mlp
bad "passes over what has no end" "--epochs 2|--data random" --epochs 2 --data random
bad "passes and tokens" "--epochs|--tokens" --epochs 2 --tokens 1000
bad "less than a step of the data" "--epochs 1e-05|of a step" --epochs 0.00001
bad "no step to save" "--stop-after 0|--save|--export" --stop-after 0 --save "$dir/nothing"
bad "autocast of bf16" "--autocast|--param-dtype bf16" --autocast bf16 --param-dtype bf16
bad "a graph that is timed" "--graph 1|--comm-timing" --graph 1 --comm-timing
bad "a graph without a GPU" "--graph 1|CPU" --graph 1
bad "copy engines without a GPU" "--gather copy-engine" --gather copy-engine
bad "NCCL's reductions without a GPU" "--reduce nccl|NCCL" --reduce nccl
bad "owners where nothing is sharded" "--reduce copy-engine|--shard none" --reduce copy-engine --shard none
bad "frozen parameters that there are not" "--freeze blok|--show-params" --freeze blok
bad "all parameters frozen" "--freeze embedding,block,head|nothing is left to train" --freeze embedding,block,head
if [ "$(./train --hardware 2>/dev/null | grep -c '"gpus": *0')" = 1 ]; then
  mpi -np 2 ./train --device gpu --preset tiny
  judge "no GPU" "--device gpu"
else
  skipped=$((skipped + 1))
  echo "skipped: --device gpu without a GPU: there is one here"
fi

# ------------------------------------------------------------------------------------------------------------ data
# u16 N...: numbers as two bytes each, little end first.
# shellcheck disable=SC2059 # the format is the data
u16() { for n in "$@"; do printf "\\x$(printf %02x $((n & 255)))\\x$(printf %02x $((n >> 8)))"; done; }
# tokens MAGIC COUNT: 200 tokens of two bytes behind a header that says COUNT.
tokens() {
  printf '%s' "$1"
  u16 2 0 0 0 "$2" 0 0 0
  # shellcheck disable=SC2046
  u16 $(seq 0 199)
}
bad "data file missing" "$dir/none.txt|No such file" --data "$dir/none.txt"
bad "data file is a FIFO" "$dir/fifo|not a regular file" --data "$dir/fifo"
bad "data file is a device" "/dev/zero|not a regular file" --data /dev/zero
bad "data file is a directory" "$dir|not a regular file" --data "$dir"
: >"$dir/empty.txt"
bad "data file empty" "$dir/empty.txt|empty" --data "$dir/empty.txt"
echo "too short" >"$dir/short.txt"
bad "data file shorter than a batch" "$dir/short.txt|10 tokens|65" --data "$dir/short.txt"
tokens TOKENS99 200 >"$dir/magic.bin"
bad "data file with a wrong magic number" "$dir/magic.bin|magic" --data "$dir/magic.bin"
tokens TOKENS01 201 >"$dir/truncated.bin"
bad "data file truncated" "$dir/truncated.bin|truncated|201|200" --data "$dir/truncated.bin"
tokens TOKENS01 200 >"$dir/tokens.bin"
bad "token outside the vocabulary" "$dir/tokens.bin|token 100|index 100|vocab" --data "$dir/tokens.bin" --vocab 100
bad "validation file missing" "$dir/none.txt" --val-every 1 --val-data "$dir/none.txt"

# ----------------------------------------------------------------------------------------------------------- ranks
mpi -np 1 ./train "${small[@]}" : -np 1 ./train "${small[@]}" --lr 0.5
judge "ranks that disagree on an option" "lr"
# Rank 1 alone does not find the file that both were given; rank 0 must not wait for it.
mkdir "$dir/a" "$dir/b"
yes "all work and no play" | head -n 2000 >"$dir/a/text.txt"
mpi -np 1 -wdir "$dir/a" "$PWD/train" "${small[@]}" --data text.txt : \
  -np 1 -wdir "$dir/b" "$PWD/train" "${small[@]}" --data text.txt
judge "an error on one rank alone" "text.txt" "No such file"

# Ranks that are not what was meant: what a launcher started, MPI's number of ranks, the program.
for plan in OMPI_COMM_WORLD_SIZE=0 OMPI_COMM_WORLD_SIZE=abc "PMI_RANK=0 PMI_SIZE=0" "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=2"; do
  # shellcheck disable=SC2086
  timeout -k 5 $limit env $plan ./train --plan --preset tiny >"$dir/out" 2>&1
  status=$?
  judge "a plan under $plan" "${plan##* }"
done
for by in "WORLD_SIZE=4 RANK=1 LOCAL_RANK=1:WORLD_SIZE=4|mpirun -np 4 ./train --device cpu" \
  "SLURM_NTASKS=4 SLURM_PROCID=0:SLURM_NTASKS|srun --mpi=pmix -n 4 ./train --device cpu" \
  "SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=2:srun started 4|--mpi=pmix" "PMI_SIZE=2 PMI_RANK=1:MPICH|mpirun -np 2 ./train"; do
  # shellcheck disable=SC2086
  timeout -k 5 $limit env ${by%%:*} ./train "${small[@]}" >"$dir/out" 2>&1 </dev/null
  status=$?
  IFS='|' read -r -a words <<<"${by#*:}"
  judge "processes that MPI does not join, ${by%%:*}" "${words[@]}"
done
WORLD_SIZE=4 good "one rank that is meant" "step" "${small[@]}" --allow-single-rank
WORLD_SIZE=4 FSDP_ALLOW_SINGLE_RANK=1 good "one rank that is meant, by a variable" "step" "${small[@]}"
export WORLD_SIZE=4
mpi -np 1 ./train "${small[@]}"
unset WORLD_SIZE
verdict "one rank by mpirun in an environment of torchrun's" "$([ "$status" = 0 ] || echo "exit status $status")"
objcopy --dump-section .note.gnu.build-id="$dir/id" train /dev/null && cp train "$dir/other" &&
  printf '\252\125\252' | dd of="$dir/id" bs=1 seek=20 conv=notrunc 2>/dev/null &&
  objcopy --update-section .note.gnu.build-id="$dir/id" "$dir/other"
mpi -np 1 ./train "${small[@]}" : -np 2 "$dir/other" "${small[@]}"
judge "ranks of another build" "ranks 1 to 2" "another build" "copy one build"
mpi -np 2 ./train "${small[@]}" --log "$dir/places.jsonl"
wrong=""
grep -q "^  1 of 2 *1 *$(hostname) " "$dir/out" || wrong="no line of rank 1"
[ "$(grep -c '^FSDP: shard full over 2 of 2 ranks.*; in PyTorch FULL_SHARD' "$dir/out")" = 1 ] || wrong="$wrong; no line of the sharding"
head -n 1 "$dir/places.jsonl" | grep -q "\"launch\":\[.*\"host\":\"$(hostname)\",\"local_rank\":1,\"pid\":[0-9]*,\"rank\":1}\]" ||
  wrong="$wrong; no rank 1 in the log's header"
verdict "where the ranks are and how the model is sharded" "${wrong#; }"

# What no other rank can know of: rank 1 throws while the others wait for it in a collective.
mpi -np 3 build/test_ranks "[.throws]"
judge "a rank that throws while others wait" "rank 1" "out of luck"

# ---------------------------------------------------------------------------------------------------------- memory
bad "no room in memory" "memory" --dim 65536 --heads 64 --kv-heads 64 --hidden 262144 --depth 1000 --vocab 256

# ---------------------------------------------------------------------------------------------------- at a terminal
# at_terminal COLUMNS WORD...: a command under a terminal of its own; in $dir/raw all that came, in $dir/pieces each piece
# that was redrawn on a line of its own, in $dir/out what stayed.
at_terminal() {
  local columns=$1
  shift
  TERM=xterm timeout -k 5 $limit script -qec "stty cols $columns; $*" "$dir/typescript" >"$dir/raw" 2>&1 </dev/null
  status=$?
  sed -E 's/\r$//; s/\x1b\[[0-9;]*m//g' "$dir/raw" >"$dir/plain"
  sed 's/\r\x1b\[K/\n/g' "$dir/plain" >"$dir/pieces"
  sed 's/.*\r\x1b\[K//' "$dir/plain" >"$dir/out"
}
long=(--device cpu --preset tiny --seq 64 --batch 1 --steps 40 --val-every 16)
if command -v script >/dev/null; then
  # shellcheck disable=SC2086 # a list of flags
  for start in "" "mpirun $MPIRUN_FLAGS -np 2"; do
    name="a live line${start:+ under mpirun}"
    at_terminal 60 "$start ./train ${long[*]} --stall 0.001"
    wrong=$([ "$status" = 0 ] || echo "exit status $status")
    grep -q 'avg loss [0-9.]* .*left ' "$dir/pieces" || wrong="$wrong; no smoothed loss and time left"
    awk '/^step / && length > 59 { exit 1 }' "$dir/pieces" || wrong="$wrong; wider than the terminal"
    [ "$(grep -aoE '^step [0-9]+/40 loss' "$dir/out" | grep -oE '[0-9]+/' | paste -sd' ')" = "1/ 4/ 8/ 12/ 16/ 20/ 24/ 28/ 32/ 36/ 40/" ] ||
      wrong="$wrong; what stays is not a tenth of the steps, and the validations"
    [ "$(grep -c '^step .* val ' "$dir/out")" = 2 ] || wrong="$wrong; not two validations"
    [ "$(grep -c warning: "$dir/raw")" -gt 0 ] || wrong="$wrong; no warning"
    [ "$(grep -o warning: "$dir/raw" | wc -l)" = "$(grep -c '^warning: rank [0-9]*: no step .* is awaited$' "$dir/out")" ] ||
      wrong="$wrong; a warning is not alone in its line"
    grep -q $'\e\\[33mwarning:\e\\[0m' "$dir/raw" || wrong="$wrong; no colour"
    verdict "$name" "${wrong#; }"
  done
  NO_COLOR=1 at_terminal 60 "./train ${long[*]}"
  verdict "NO_COLOR" "$(! grep -q $'\e\\[[0-9;]*m' "$dir/raw" && grep -q $'\r\e\\[K' "$dir/raw" || echo "there are colours, or no live line")"
  at_terminal 60 "./train ${long[*]} --log-every 10"
  verdict "plain lines at a terminal" "$(! grep -q $'\e' "$dir/raw" && [ "$(grep -c '^step  *[0-9]*/40  loss' "$dir/raw")" = 7 ] || echo "not 7 plain lines")"
  at_terminal 60 "./train ${long[*]} --log $dir/none/log"
  verdict "an error in red" "$(grep -q $'\e\\[1;31merror:\e\\[0m --log' "$dir/raw" || echo "it is not")"
  at_terminal 60 "./train ${long[*]} 2>&1 | cat"
  verdict "a pipe at a terminal" "$(! grep -q $'\e' "$dir/raw" && [ "$(grep -c '^step ' "$dir/raw")" = 40 ] || echo "not 40 plain lines")"
else
  skipped=$((skipped + 1))
  echo "skipped: a live line at a terminal: there is no script (bsdutils)"
fi

# ---------------------------------------------------------------------------------------------------- TensorBoard
# A run that is killed behind its checkpoint, and goes on from there with other ranks; read by TensorBoard itself.
events=(--device cpu --preset tiny --seq 64 --global-batch 6 --steps 20 --val-every 5 --save "$dir/with-events" --tensorboard "$dir/events")
mpi -np 2 ./train "${events[@]}" --save-every 8 --stop-after 8
mpi -np 2 ./train "${events[@]}" --resume latest --lr 1 --stop-after 12 --log "$dir/events-lost.jsonl"
rm -r "$dir/with-events/step-12" && ln -sfn step-8 "$dir/with-events/latest"
mpi -np 3 ./train "${events[@]}" --resume latest --log "$dir/events.jsonl"
verdict "event files of rank 0 alone, one a run" "$([ "$status" = 0 ] && [ "$(ls "$dir/events" | wc -l)" = 3 ] || ls "$dir/events")"
cat >"$dir/events.py" <<'END'
import json, sys
from tensorboard.backend.event_processing import event_accumulator
events = event_accumulator.EventAccumulator(sys.argv[1])
events.Reload()
scalars = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
want = {"gradient norm", "learning rate", "loss/training", "loss/validation", "memory/peak MiB",
        "speed/ms per step", "speed/tokens per second"}
assert set(scalars) - {"speed/MFU"} == want, scalars.keys()
assert sorted(scalars["loss/training"]) == list(range(1, 21)), scalars["loss/training"]
assert sorted(scalars["loss/validation"]) == [5, 10, 15, 20]
for line in open(sys.argv[2]):
    step = json.loads(line)
    if "step" in step:
        for tag, key in (("loss/training", "loss"), ("gradient norm", "grad_norm"), ("learning rate", "lr")):
            assert abs(scalars[tag][step["step"]] / step[key] - 1) < 1e-5, (tag, step)
END
if python3 -c 'import tensorboard' 2>/dev/null; then
  python3 "$dir/events.py" "$dir/events" "$dir/events.jsonl" >"$dir/out" 2>&1
  verdict "TensorBoard reads what a run and its next parts wrote" "$([ $? = 0 ] || echo "it does not")"
else
  skipped=$((skipped + 1))
  echo "skipped: event files read by TensorBoard: python3 has no tensorboard (pip install tensorboard)"
fi
bad "events in a file" "--tensorboard $dir/events.py|not a directory" --tensorboard "$dir/events.py"
bad "events where checkpoints are" "--tensorboard $dir/with-events|where checkpoints are" --tensorboard "$dir/with-events" --save "$dir/with-events" --resume latest
bad "events that cannot be written" "--tensorboard|/proc/none" --tensorboard /proc/none
# shellcheck disable=SC2016 # another shell's
mpi -np 1 bash -c 'ulimit -f 8 && exec "$@"' - ./train --device cpu --preset tiny --seq 32 --steps 60 --tensorboard "$dir/full-events"
verdict "events on a full disk" "$([ "$status" = 0 ] && [ "$(tr -d '\r' <"$dir/out" | grep -c '^warning: --tensorboard: events from here on are missing: .*training continues$')" = 1 ] && \
  grep -q '^step *60/60' "$dir/out" || echo "status $status, or not one warning")"

# ----------------------------------------------------------------------------------------------------- completion
# tab EXPECTED WORD...: what bash offers for the last word, in its order, with | between.
touch "$dir/my words.bin" && mkdir "$dir/my words"
./train --completion bash >"$dir/completion"
tab() {
  local expected=$1 got
  shift
  # shellcheck disable=SC2016 # another shell's
  got=$(cd "$dir" && bash --norc -uc 'source ./completion; COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    rule=$(complete -p "${1##*/}") && [[ $rule =~ -F\ ([_a-z]+) ]] && "${BASH_REMATCH[1]}"
    IFS="|"; echo "${COMPREPLY[*]-}"' - "$@" 2>&1)
  echo "$got" >"$dir/out"
  verdict "Tab behind: $*" "$([ "$got" = "$expected" ] || echo "not $expected")"
}
tab "--preset" ./train --pres
tab "--wrap|--wrap-min-params" ./train --dim 64 --wrap
tab "simple|rope|llama|mlp" train --arch ""
tab "sublayer|single" ./train --wrap = s
tab "fp32" ./train --tf32 --param-dtype f
tab "hybrid:" ./train --shard h
tab "0|1" ./train --graph ""
tab "" ./train --dim ""
tab "my words.bin" ./train --data "my words."
tab "latest" ./train --resume l
tab "my words" ./train --save my
tab "sharding" ./train --help sh
tab "llama" mpirun -np 2 ./train --arch l
tab "" mpirun --arch l
tab "$(./train --help | sed -n 's/^  \(--[-a-z0-9]*\).*/\1/p' | sort -u | paste -sd'|')" ./train --
if command -v shellcheck >/dev/null; then
  shellcheck -s bash "$dir/completion" >"$dir/out"
  verdict "the script for completion is clean" "$([ ! -s "$dir/out" ] || echo "shellcheck says")"
fi

# ------------------------------------------------------------------------------------------- instead of training
good "help" "Instead of training" --help
good "version" "MPI" --version
good "hardware" '"gpus"' --hardware
good "hardware of the host" '"host":{"cores":' --hardware
good "versions of libraries" '"mpi":"' --hardware
good "presets" "m7c-125m" --list-presets
good "a section of the help" "--limit-all-gathers N" --help sharding
bad "no section of the help" "--help shardin|did you mean sharding?|instead-of-training" --help shardin
mpi -np 3 ./train --help sharding
verdict "under mpirun help is printed once" "$([ "$(tr -d '\r' <"$dir/out" | grep -c '^SHARDING$')" = 1 ] || echo "it is not")"
bad "a shell that is not known" "--completion zsh|bash" --completion zsh
good "parameters" "head" --show-params --preset tiny --device cpu
good "plan for a model that is not here" "MiB" --plan --world 8 --preset llama-8b
good "time of a step on ranks that are not here" "tokens/s a GPU" --plan --gpu h200 --world 4096 --preset llama-8b
good "what to change so that it fits" "the cheapest change that fits: --moments bf16" --plan --preset llama-8b --gpu h200
good "a knob to put back so that it fits" "the cheapest change that fits: --wrap block:" --plan --preset llama-8b --gpu h100 --world 4 --wrap single
good "a cheaper knob to put back" "the cheapest change that fits: --accum-sync every:" --plan --preset llama-8b --gpu h100 --world 8 --grad-accum 2 --accum-sync last
good "units of a plan" "block.0 to block.31" --plan --world 8 --preset llama-8b
good "frozen" "frozen" --show-params --preset tiny --freeze embedding
good "schedule" "one rank: nothing moves" --show-schedule --world 4 --shard hybrid:1 --preset tiny
# Every knob of sharding reaches the step: how often something is in the schedule and the plan with it, and without it.
# Without numbers of lines and MiB of what moves, and with one blank between words.
told() {
  local preset=(--preset tiny)
  [[ " $* " != *" --preset "* ]] || preset=()
  ./train --plan --show-schedule --gpu h200 --world 4 "${preset[@]}" "$@" 2>&1 | sed -E 's/^ +[0-9]+  (gather|reduce|compute) /\1 /
    s/ [0-9.]+  (bf16|fp32|fp64)/ \1/; /^compute (use|release) /d' | tr -s ' \n' | tr '\n' ';'
}
# knob ERE HOW-OFTEN HOW-OFTEN-WITHOUT OPTION...
told >"$dir/plain"
knob() {
  local pattern=$1 want=$2 without=$3 n m
  shift 3
  told "$@" >"$dir/out"
  n=$(grep -oE -- "$pattern" "$dir/out" | wc -l)
  m=$(grep -oE -- "$pattern" "$dir/plain" | wc -l)
  verdict "the knob $*" "$([ "$n $m" = "$want $without" ] || echo "'$pattern' is there $n times, and $m without it, not $want and $without")"
}
knob 'all_gather block.0 ' 1 2 --shard grad
knob 'all_gather block.0 ' 1 2 --reshard-after-forward 0
knob 'all_gather ' 0 5 --shard none
knob 'reduce all_reduce [a-z.0-9]+ bf16, 4 ranks' 4 0 --shard none
knob 'all_gather [a-z.0-9]+ bf16, 2 ranks' 5 0 --shard hybrid:2
knob 'reduce all_reduce all ' 2 1 --shard hybrid:2
knob 'reduce_scatter ' 6 4 --wrap sublayer
knob 'reduce_scatter ' 1 4 --wrap single
knob 'reduce_scatter ' 1 4 --wrap auto
knob 'reduce_scatter ' 6 4 --wrap auto --wrap-min-params 1
knob 'reduce_scatter ' 25 4 --preset m7c --wrap auto --wrap-min-params 20000000 --bucket-mb 8
knob 'gather slots 0.0 0.4 .*into 1 slot;' 1 0 --limit-all-gathers 1
knob 'into 3 slots;.*;(gather all_gather [^;]*;){3}compute' 1 0 --limit-all-gathers 3
knob '(gather all_gather [^;]*;){4}' 1 0 --limit-all-gathers off
knob 'gradient slots 0.0 1.2' 1 0 --gradient-slots 3
knob 'waiting for gathers 0.0[0-9]' 0 1 --forward-prefetch 0
knob 'reduce_scatter head [^;]*;gather all_gather block.0' 0 1 --backward-prefetch post
knob 'reduce_scatter block.1 [^;]*;gather all_gather block.0' 1 0 --backward-prefetch none
knob 'all_gather [a-z.0-9]+ fp32' 5 0 --param-dtype fp32
knob 'reduce_scatter [a-z.0-9]+ fp32' 4 0 --reduce-dtype fp32
knob 'all_gather [a-z.0-9]+ fp32' 5 0 --autocast bf16
knob ' moments 0.0 0.5 .*moments in bf16;' 1 0 --moments bf16
knob 'compute recompute MLP block' 2 0 --recompute mlp
knob 'compute recompute attention block' 2 0 --recompute attn
knob 'compute recompute (MLP|attention) block' 4 0 --recompute both
knob 'recompute attention block.1;compute recompute MLP' 1 0 --recompute block
knob 'activations 0.0 0.0 1.5;' 1 0 --recompute attn --keep-attention 1
knob 'reduce_scatter ' 8 4 --grad-accum 2
knob 'reduce_scatter ' 4 4 --grad-accum 2 --accum-sync last
knob 'reduce all_reduce replicated' 1 0 --replicate-below 65536
knob ' master 2.4 .*initialized unsharded, then sharded;' 1 0 --meta-init 0
knob 'reduce optimizer block' 2 0 --optimizer-in-backward 1 --clip 0
knob 'reduce all_reduce all ' 2 1 --clip-norm inf
knob 'no clipping' 1 0 --clip 0
knob "gathers by NCCL's kernels" 1 0 --gather nccl
knob 'gathers by copy engines, into' 1 1 --gather copy-engine
knob 'reduce all_to_all [a-z.0-9]+ bf16, 4 ranks' 4 0 --reduce copy-engine
knob 'reduce (all_to_all|all_reduce) [a-z.0-9]+ bf16, 2 ranks' 8 0 --reduce copy-engine --shard hybrid:2
knob 'beside it: 4 all_to_all,.*reductions by all-to-all and a sum in rank order' 1 0 --reduce copy-engine
knob "reductions by NCCL's kernels" 1 1 --reduce nccl
knob 'with --gather mpi is not estimated.*gathers by MPI,' 1 0 --gather mpi
knob 'the host, 1 call .*one CUDA graph' 1 0 --graph 1
knob 'epilogues are kernels of their own' 1 0 --fuse 0
knob "products by cuBLASLt's first choice" 1 0 --tune-matmul 0
knob 'reduce_scatter head' 0 1 --tie-embeddings
knob 'reduce_scatter block.0' 0 1 --freeze block.0
# What it says before a run is what the run takes, on CPU ranks too.
wrong=""
for with in "" "--shard none" "--shard hybrid:2 --wrap sublayer --recompute both" "--autocast bf16 --accum-sync last --grad-accum 2" \
  "--reduce copy-engine --reduce-dtype bf16"; do
  # shellcheck disable=SC2086
  mpi -np 2 ./train "${small[@]}" --log "$dir/memory.jsonl" $with
  ran=$(head -n 1 "$dir/memory.jsonl" | grep -o '"planned_peak_mib":[0-9.]*' | cut -d: -f2)
  # shellcheck disable=SC2086
  planned=$(./train --plan --world 2 "${small[@]}" $with | awk '$1 == "arena" { print $2 }')
  [ "$status" = 0 ] && [ "$ran" = "$planned" ] || wrong="$wrong; $with: planned $planned MiB, ran $ran"
done
verdict "the plan's peak is the run's" "${wrong#; }"
mpi -np 2 ./train --plan --device cpu --preset tiny --dim 100 --heads 3 --kv-heads 1
judge "a plan of what cannot be, under mpirun" "--dim 100" "--heads 3"
# Nothing that is there is written over, by whatever name it is called.
mkdir "$dir/mine"
yes "all work and no play" | head -n 3000 >"$dir/mine/text"
ln "$dir/mine/text" "$dir/mine/hard"
ln -s text "$dir/mine/soft"
mkfifo "$dir/mine/fifo"
echo 'seed = 3' >"$dir/mine/config"
echo mine >"$dir/mine/a.safetensors"
ln -s text "$dir/mine/soft.safetensors"
tar -C "$dir/mine" -cf "$dir/mine.tar" .
for file in text hard soft ../mine//text; do
  bad "a log onto the data, $file" "--log $dir/mine/$file|the same file as --data" --data "$dir/mine/text" --log "$dir/mine/$file"
  bad "an export onto the data, $file" "--export $dir/mine/$file|the same file as --data" --data "$dir/mine/text" --export "$dir/mine/$file"
done
bad "a log onto the validation data" "--log|the same file as --val-data" --val-every 1 --val-data "$dir/mine/text" --log "$dir/mine/hard"
bad "a log onto the options" "--log|the same file as --config" --config "$dir/mine/config" --log "$dir/mine/config"
bad "a log onto another file" "--log $dir/mine/config|not a training log" --log "$dir/mine/config"
bad "a log onto a FIFO" "--log $dir/mine/fifo|not a regular file" --log "$dir/mine/fifo"
bad "a log onto a device" "--log /dev/null|not a regular file" --log /dev/null
bad "log and export in one" "--export $dir/mine/../mine/new|the same file as --log" --log "$dir/mine/new" --export "$dir/mine/../mine/new"
bad "an export onto another file" "--export|$dir/mine/config is not a directory" --export "$dir/mine/config"
bad "an export onto another model" "--export|$dir/mine/a.safetensors exists" --export "$dir/mine/a.safetensors"
bad "an export beside another model" "--export|$dir/mine/a.safetensors exists" --export "$dir/mine"
bad "an export onto a link" "--export|$dir/mine/soft.safetensors|not a regular file" --export "$dir/mine/soft.safetensors"
bad "an export onto a device" "--export|/dev/null is not a directory" --export /dev/null
verdict "files of the user's are as they were" "$(tar -C "$dir/mine" -df "$dir/mine.tar" 2>&1; ls "$dir/mine" | grep -x new)"
verdict "/dev/null is a device" "$([ -c /dev/null ] || echo "it is not")"
bad "an export to nowhere" "--export|/nonexistent/model|No such file" --export /nonexistent/model
mkdir "$dir/folder.safetensors"
bad "an export onto a directory" "--export|Is a directory" --export "$dir/folder.safetensors"
bad "files of a size for one file" "--export-shard-mb" --export "$dir/model.safetensors" --export-shard-mb 7
verdict "an export that cannot be is refused before training" "$(! grep -q "^step" "$dir/out" || echo "it trains")"
judge_plan() { # NAME WORD OPTION...: refused before the run as in it
  local name=$1 word=$2
  shift 2
  ./train --plan "$@" >"$dir/out" 2>&1
  status=$?
  judge "$name" "$word"
}
judge_plan "a plan of copy engines between hosts" "several hosts" --world 16 --gather copy-engine
judge_plan "a plan of reductions by copy engines between hosts" "several hosts" --world 16 --reduce copy-engine
judge_plan "a plan of a graph on a CPU" "--graph 1" --device cpu --graph 1
judge_plan "a plan of copy engines on a CPU" "--gather copy-engine" --device cpu --world 2 --gather copy-engine
good "a run" "step" "${small[@]}" --log "$dir/log.jsonl"
wrong=""
touch "$dir/log.jsonl"
[ "$(wc -l <"$dir/log.jsonl")" = 3 ] || wrong="not a header and two steps"
for key in config commit hardware memory; do head -n 1 "$dir/log.jsonl" | grep -q "\"$key\"" || wrong="$wrong; no $key in the header"; done
for key in step loss tokens_per_sec grad_norm lr timestamp step_ms peak_mib mfu; do
  tail -n 1 "$dir/log.jsonl" | grep -q "\"$key\"" || wrong="$wrong; no $key in a step"
done
cp "$dir/log.jsonl" "$dir/out"
verdict "the log of a run" "${wrong#; }"

mpi -np 2 ./train --device cpu --preset tiny --seq 64 --batch 1 --steps 4 --val-every 2 --val-batches 64 --comm-timing --log "$dir/timed.jsonl"
sed -n 's/.*"exposed_gather_ms":\([^,]*\),"exposed_reduce_ms":\([^,]*\),.*"step_ms":\([^,]*\),.*/\1 \2 \3/p' "$dir/timed.jsonl" >"$dir/times"
verdict "a step's exposed communication is its own" "$(awk '$1 + $2 <= $3 { n++ } END { exit !(NR == 4 && n == NR) }' "$dir/times" || echo "not below the step's time: $(xargs <"$dir/times")")"
# A trace of two ranks by marks, and of a plan; a file that is none is left alone.
mpi -np 2 ./train "${small[@]}" --profile --trace "$dir/trace.json" --log "$dir/profile.jsonl"
wrong=""
for word in '"source":"marks"' '"command":"mpirun -np 2' '"step":2' '"name":"all_gather"' '"unit":"block.0"' \
  '"name":"reduce_scatter"' '"name":"MLP, backward"' '"name":"waiting for communication"'; do
  grep -q "$word" "$dir/trace.json" || wrong="$wrong; no $word in the trace"
done
grep -q '"profile_ms"' "$dir/profile.jsonl" || wrong="$wrong; no profile in the log"
[ "$(grep -c '"ended":"20' "$dir/profile.jsonl")" = 1 ] || wrong="$wrong; not one step says when it ended"
verdict "the trace of a run" "${wrong#; }"
good "the trace of a plan" "MiB" --plan --world 2 --preset m7c --trace "$dir/trace.json"
verdict "a plan's trace replaces a run's" "$(grep -q '"source":"plan"' "$dir/trace.json" || echo "it does not")"
echo "{}" >"$dir/foreign.json"
bad "a trace over a file of the user's" "--trace $dir/foreign.json|not a trace" --trace "$dir/foreign.json"
judge_plan "a plan's trace over a file of the user's" "not a trace" --trace "$dir/foreign.json"
judge_plan "a trace of a plan for a CPU" "--device cpu" --device cpu --trace "$dir/trace.json"
verdict "a file of the user's is as it was" "$([ "$(cat "$dir/foreign.json")" = "{}" ] || echo "it is not")"
bad "a trace that is the log" "--trace|--log" --log "$dir/new" --trace "$dir/new"
bad "diagnostics of dense attention" "--nsa-stats|dense" --attn dense --nsa-stats --log "$dir/stats.jsonl"
# Two blocks, each of which makes 7 calls a micro-batch forward and 6 backward.
good "diagnostics of a run" "step" "${small[@]}" --grad-accum 2 --nsa-stats --log "$dir/stats.jsonl"
wrong=""
touch "$dir/stats.jsonl"
for stage in compression compressed selection selected window gates window_backward compressed_backward \
  selected_backward compression_backward; do
  [ "$(tail -n 1 "$dir/stats.jsonl" | grep -o "\"$stage\":\"plain loops\"" | wc -l)" = 2 ] || wrong="$wrong; no kernel of $stage"
done
for count in '"kernel_calls":26' '"general":0' '"sel_k_mean":32.5'; do
  [ "$(tail -n 1 "$dir/stats.jsonl" | grep -o "$count\b" | wc -l)" = 2 ] || wrong="$wrong; not $count for each block"
done
cp "$dir/stats.jsonl" "$dir/out"
verdict "the log of a run's diagnostics" "${wrong#; }"
# What the files hold does not depend on the number of ranks, but for the speed; a batch of 5 leaves padding.
d="$dir/diagnostics"
wrong=""
for n in 1 2 3 4; do
  mpi -np "$n" ./train --device cpu --preset tiny --seq 64 --global-batch 5 --steps 4 --diagnostics "$d/$n" --nsa-stats --log "$d$n.jsonl"
  [ "$status" = 0 ] || wrong="$wrong; exit status $status with $n ranks"
  [ "$(cat "$d/$n"/heartbeat_rank*.jsonl | grep -c '"msg":"progress"')" = $((4 * n)) ] || wrong="$wrong; not 4 heartbeats of each of $n ranks"
  for file in k_stats_fsdp.csv fallback_counters_fsdp.csv; do cmp -s "$d/1/$file" "$d/$n/$file" || wrong="$wrong; $file with $n ranks"; done
  [ "$(tail -n 1 "$d$n.jsonl" | grep -o '"sel_rows":320.0\b' | wc -l)" = 2 ] || wrong="$wrong; not all rows in the log with $n ranks"
done
{ head -n 1 "$d/2/k_stats_fsdp.csv" | grep -qx 'step,k_mean,k_max,rows,pct_at_max'; } || wrong="$wrong; the columns of k_stats"
[ "$(tail -n 1 "$d/2/k_stats_fsdp.csv")" = '4,32.5000,64,640,0.0156' ] || wrong="$wrong; the last row of k_stats"
verdict "the files of --diagnostics at 1 to 4 ranks" "${wrong#; }"
# Killed behind a checkpoint and resumed by another number of ranks: the rows are those of a run that was not.
run=(--device cpu --preset tiny --seq 64 --global-batch 4 --steps 9)
mpi -np 2 ./train "${run[@]}" --diagnostics "$d/whole"
mpi -np 2 ./train "${run[@]}" --diagnostics "$d/parts" --save "$dir/parts" --stop-after 5
printf '6,1.0,1.0,1\n7,1' >>"$d/parts/training_fsdp.csv"
mpi -np 3 ./train "${run[@]}" --diagnostics "$d/parts" --save "$dir/parts" --resume latest
wrong=""
[ "$status" = 0 ] || wrong="exit status $status"
cmp -s "$d/whole/k_stats_fsdp.csv" "$d/parts/k_stats_fsdp.csv" || wrong="$wrong; k_stats differ"
for part in whole parts; do cut -d, -f1,3 "$d/$part/training_fsdp.csv" >"$d/$part.steps"; done
cmp -s "$d/whole.steps" "$d/parts.steps" || wrong="$wrong; steps or learning rates differ"
verdict "the files of --diagnostics of a run that is resumed" "${wrong#; }"
bad "a directory of diagnostics that is a file" "--diagnostics $dir/stats.jsonl|not a directory" --diagnostics "$dir/stats.jsonl"
bad "diagnostics that cannot be written" "--diagnostics|/proc/none" --diagnostics /proc/none
bad "diagnostics where checkpoints are" "--diagnostics $dir/parts|where checkpoints are" --diagnostics "$dir/parts" --save "$dir/parts" --resume latest
bad "memory written nowhere" "--mem-dump-every|--diagnostics" --mem-dump-every 5
# A rank that stands still: the others say so.
# shellcheck disable=SC2086
timeout -k 5 $limit mpirun $MPIRUN_FLAGS -np 2 ./train "${small[@]:0:6}" --steps 100000 --stall 0.5 --diagnostics "$d/stall" >"$dir/out" 2>&1 </dev/null &
for ((i = 0; i < 100; i++)); do grep -qs progress "$d/stall/heartbeat_rank1.jsonl" && break || sleep 0.1; done
pid=$(sed -n '1s/.*"pid":\([0-9]*\).*/\1/p' "$d/stall/heartbeat_rank1.jsonl")
kill -STOP "$pid"
for ((i = 0; i < 100; i++)); do grep -qs stall "$d/stall/heartbeat_rank0.jsonl" && break || sleep 0.1; done
wrong=""
[ "$(grep -c '"msg":"stall"' "$d/stall/heartbeat_rank0.jsonl")" = 1 ] || wrong="rank 0's heartbeat does not say so once"
kill -KILL "$pid"
wait $! 2>/dev/null
grep -q "warning: rank 0: no step has ended for 0.5.* s: step .* is awaited" "$dir/out" || wrong="$wrong; the terminal does not say so"
verdict "a stall" "${wrong#; }"

# --------------------------------------------------------------------------------------- what goes while a run goes on
# Data that changes under two ranks, a log that may not grow, an output that nobody reads.
long=(--device cpu --preset tiny --seq 64 --batch 1 --steps 1000000 --minutes 0.1)
mpi_until() { # COMMAND OPTION...: like mpi -np 2 ./train, with the command run when two steps are there
  local command=$1 start=$SECONDS
  shift
  # shellcheck disable=SC2086
  timeout -k 5 $limit mpirun $MPIRUN_FLAGS -np 2 ./train "${long[@]}" "$@" 2>&1 </dev/null | cat >"$dir/out" &
  for ((i = 0; i < 100; i++)); do grep -q '^step *2/' "$dir/out" && break || sleep 0.1; done
  $command
  wait $!
  took=$((SECONDS - start)) status=0
  ! grep -q '^error: ' "$dir/out" || status=1
}
changing() { cp "$dir/mine/text" "$dir/changing" && touch -d 2001-01-01 "$dir/changing"; }
changing
mpi_until "truncate -s 1000 $dir/changing" --data "$dir/changing"
judge "data that is cut under a run" "$dir/changing" "was cut" "had 63000 bytes and has 1000" "byte "
changing
mpi_until "touch $dir/changing" --data "$dir/changing"
judge "data that is written to under a run" "$dir/changing" "was written to" "byte "
changing
overwrite() { tr a-z '\200' <"$dir/mine/text" | dd of="$dir/changing" conv=notrunc 2>/dev/null; }
mpi_until overwrite --data "$dir/changing" --vocab 128
judge "tokens beyond the vocabulary under a run" "$dir/changing" "token 128" "byte "
changing
mpi_until "rm $dir/changing" --data "$dir/changing"
verdict "data that is removed under a run is read on" "$(grep -q "$dir/changing was removed" "$dir/out" && grep -q "minutes reached" "$dir/out" || echo "it is not, or is not said")"
if command -v prlimit >/dev/null; then
  stunt() { pgrep -f -- "--log $dir/stunted" | while read -r p; do prlimit --pid "$p" --fsize=4000; done; }
  mpi_until stunt --log "$dir/stunted.jsonl"
  verdict "a log that may not grow is said once, and the run goes on" \
    "$([ "$(grep -c 'lines from here on are missing' "$dir/out")" = 1 ] && grep -q "minutes reached" "$dir/out" || echo "not so")"
else
  skipped=$((skipped + 1))
  echo "skipped: a log that may not grow: there is no prlimit"
fi
timeout -k 5 $limit ./train "${small[@]:0:6}" --steps 50 --log "$dir/unread.jsonl" --save "$dir/unread" 2>"$dir/out" | head -n 1 >/dev/null
wrong=""
[ "${PIPESTATUS[0]}" = 0 ] || wrong="it did not end well"
[ "$(grep -c '"step":' "$dir/unread.jsonl")" = 50 ] || wrong="$wrong; the log does not have all steps"
[ -e "$dir/unread/latest" ] || wrong="$wrong; nothing was saved"
verdict "a run whose output nobody reads goes on" "${wrong#; }"

# ----------------------------------------------------------------------------------------------------------- sweeps
bench() { # the rest of a ./bench command line, on the CPU; output in $dir/out, status in $status
  CUDA_VISIBLE_DEVICES='' timeout -k 5 60 ./bench "$@" >"$dir/out" 2>&1 </dev/null
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
  verdict "the rows of a sweep" "${wrong#; }"
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
bench --sweep depth --continue "${tiny_steps[@]}" --out "$dir/depth.jsonl" -- --seq 64 --batch 1
rows "$dir/depth.jsonl" 4
[ "$(head -n 1 "$dir/depth.jsonl")" = "$(head -n 1 "$dir/before.jsonl")" ]
verdict "--continue keeps the rows that are there" "$([ $? = 0 ] || echo "the first row was made again")"
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
printf '#!/bin/bash\necho "ModuleNotFoundError: No module named torch"\nexit 1\n' >"$dir/bin/python3"
PATH="$dir/bin:$PATH" bench --sweep depth --continue --only 1,3,4 --peer "${tiny_steps[@]}" --out "$dir/peer.jsonl" -- --seq 64 --batch 1
[ "$(grep -c '"step_ms":7.5' "$dir/peer.jsonl")$(grep -c '"error":"ModuleNotFoundError' "$dir/peer.jsonl")" = 21 ]
verdict "--continue keeps what is good and runs what failed" "$([ $? = 0 ] || echo "not so")"
PATH="$dir/bin:$PATH" bench --sweep depth --only 1 --peer "${tiny_steps[@]}" --out "$dir/none.jsonl" -- --seq 64 --batch 1
grep -q '"error":"ModuleNotFoundError: No module named torch".*"who":"PyTorch"' "$dir/none.jsonl"
verdict "a machine without PyTorch" "$([ $? = 0 ] || echo "no row says why")"
rm -f "$dir/none.jsonl"

# Every sweep runs here, with tiny shapes, or is planned: its first row and its last.
for sweep in $(./bench --list | sed -n 's/^| \([a-z0-9-]*\) .*| *\([0-9][0-9]*\) | *[-0-9]* | *[-0-9]* |$/\1:\2/p'); do
  bench --sweep "${sweep%:*}" --only "1,${sweep#*:}" "${tiny_steps[@]}" --out "$dir/all-${sweep%:*}.jsonl"
  wrong=""
  [ "$status" = 0 ] || wrong="exit status $status"
  head -n 1 "$dir/all-${sweep%:*}.jsonl" | grep -q '"step_ms":[0-9]' || wrong="$wrong; no step_ms in the first row"
  tail -n 1 "$dir/all-${sweep%:*}.jsonl" | grep -q "\"number\":${sweep#*:}," || wrong="$wrong; no row ${sweep#*:}"
  ! grep -q '"error"' "$dir/all-${sweep%:*}.jsonl" || wrong="$wrong; a row has an error"
  verdict "the sweep ${sweep%:*}" "${wrong#; }"
done
bench --sweep depth --only 2,8 --gpu h200 --ranks 2 --out "$dir/planned.jsonl"
rows "$dir/planned.jsonl" 2 '"planned":true' '"step_ms":[1-9]' '"peak_mib":[1-9]' '"name":"H200"'
bench --sweep mlp-1024 --dry-run --peer --gpu h200 --ranks 2
wrong=""
grep -q '^2 +autocast(bf16): mpirun -np 1 ./train .*--autocast bf16' "$dir/out" || wrong="no command of ours"
grep -q 'PyTorch: .*--nproc_per_node=2 peers/torch_fsdp.py .*--arch mlp .*--reduce-dtype bf16' "$dir/out" || wrong="$wrong; no command of PyTorch's"
verdict "--dry-run says what would run" "$wrong"
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
bench --sweep attention --ranks 2
judge "ranks of what runs in one process" "--sweep attention" "--ranks"
bench --sweep collectives -- --seq 64
judge "options for a ./train that does not run" "--sweep collectives" "--"
bench --sweep knobs --only 1000
judge "a row that there is not" "--only 1000" "knobs"
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
bench --sweep attention --gpu h200 --ranks 2
judge "what has no plan" "--sweep attention" "plan"
bench --sweep depth --out /nonexistent/rows.jsonl
judge "rows that cannot be written" "/nonexistent/rows.jsonl"
bench --sweep seq --out "$dir/depth.jsonl"
judge "another sweep's rows" "$dir/depth.jsonl" "--sweep seq"
echo "not rows" >"$dir/text"
bench --sweep seq --out "$dir/text"
judge "a file of something else" "$dir/text" "not overwritten"

# ------------------------------------------------------------------------------------------------------ checkpoints
# losses LOG: step and loss of each step after the third, from a log.
losses() { grep '"step"' "$1" 2>/dev/null | sed 's/.*"loss":\([^,]*\),.*"step":\([0-9]*\).*/\2 \1/' | awk '$1 > 3'; }
run=(--device cpu --preset tiny --seq 64 --global-batch 3 --steps 6)
mpi -np 2 ./train "${run[@]}" --log "$dir/whole.jsonl"
mpi -np 2 ./train "${run[@]}" --stop-after 3 --save "$dir/saved"
mpi -np 2 ./train "${run[@]}" --save "$dir/saved" --resume latest --log "$dir/again.jsonl" --export "$dir/model.safetensors"
wrong=""
[ "$status" = 0 ] || wrong="exit status $status"
[ "$(losses "$dir/whole.jsonl" | wc -l)" = 3 ] || wrong="$wrong; the run did not log three more steps"
[ "$(losses "$dir/whole.jsonl")" = "$(losses "$dir/again.jsonl")" ] || wrong="$wrong; the losses are not those of the unbroken run"
[ -s "$dir/model.safetensors" ] || wrong="$wrong; nothing was exported"
verdict "a run goes on from a checkpoint bit for bit" "${wrong#; }"
mpi -np 2 ./train "${run[@]}" --resume "$dir/saved/step-3" --stop-after 4 --lr 0.0001
verdict "what goes on in another way is said" "$(grep -q 'differs from the checkpoint: --lr 0.0001 (was 0.0003)' "$dir/out" || echo "it is not")"
mpi -np 2 ./train "${run[@]}" --stop-after 1 --freeze head --save "$dir/frozen"
mpi -np 3 ./train "${run[@]}" --stop-after 2 --resume "$dir/frozen"
verdict "what was frozen trains without old moments, and that is said" \
  "$(grep -q "moments begin at zero for 'head.weight', 'head.norm': frozen in the checkpoint" "$dir/out" && [ "$status" = 0 ] || echo "it does not, or is not said")"
# Before the first step there are the initial weights, the same from any number of ranks; one step makes others.
mpi -np 2 ./train "${run[@]}" --stop-after 0 --export "$dir/initial.safetensors" --export-dtype fp32
wrong=""
[ "$status" = 0 ] || wrong="exit status $status"
mpi -np 3 ./train "${run[@]}" --stop-after 0 --export "$dir/again.safetensors" --export-dtype fp32
cmp -s "$dir/initial.safetensors" "$dir/again.safetensors" || wrong="$wrong; three ranks begin with other weights than two"
mpi -np 2 ./train "${run[@]}" --stop-after 1 --export "$dir/one.safetensors" --export-dtype fp32
[ -s "$dir/one.safetensors" ] && ! cmp -s "$dir/initial.safetensors" "$dir/one.safetensors" || wrong="$wrong; a step changes nothing"
verdict "the initial weights are exported" "${wrong#; }"

# ------------------------------------------------------------------------------------------------- models in and out
# From a folder of transformers' making, through any number of ranks, and out again the same.
hf=(--device cpu --batch 1 --seq 48 --data random --export-dtype fp32)
wrong=""
from=test/hf-llama
for ranks in 2 3 1; do
  mpi -np $ranks ./train --init $from "${hf[@]}" --stop-after 0 --export "$dir/hf-$ranks" --export-shard-mb 1
  [ "$status" = 0 ] || wrong="$wrong; exit status $status with $ranks"
  from="$dir/hf-$ranks"
done
diff -r "$dir/hf-2" "$dir/hf-3" >"$dir/out" && diff -r "$dir/hf-3" "$dir/hf-1" >>"$dir/out" || wrong="$wrong; ranks change it"
[ -s "$dir/hf-1/model.safetensors" ] || wrong="$wrong; there is nothing"
verdict "a model goes in and out bit for bit at other numbers of ranks" "${wrong#; }"
# The same command line goes on, and needs no folder any more.
cp -r test/hf-llama "$dir/begun"
hf=(--init "$dir/begun" --device cpu --seq 48 --global-batch 2 --data random --steps 4 --save "$dir/hf-saved")
mpi -np 2 ./train "${hf[@]}" --stop-after 2
wrong=""
grep -q "^weights of $dir/begun (llama, BF16)" "$dir/out" || wrong="it is not said where the weights are from"
rm -r "$dir/begun"
mpi -np 2 ./train "${hf[@]}" --resume latest --log "$dir/hf.jsonl" --export "$dir/hf-out"
[ "$status" = 0 ] || wrong="$wrong; exit status $status"
grep -q "the checkpoint has the weights" "$dir/out" || wrong="$wrong; it is not said that the folder is not read"
hf[1]=test/hf-llama
mpi -np 2 ./train "${hf[@]:0:10}" --steps 4 --log "$dir/whole.jsonl"
[ "$(losses "$dir/whole.jsonl" | wc -l)" = 1 ] && [ "$(losses "$dir/whole.jsonl")" = "$(losses "$dir/hf.jsonl")" ] || wrong="$wrong; the losses are not those of the unbroken run"
grep -q '"rms_norm_eps": 0.0003' "$dir/hf-out/config.json" || wrong="$wrong; the exported model has another eps"
verdict "a run that began with a folder is resumed by the same command" "${wrong#; }"
mpi -np 2 ./train --init test/hf-llama --attn nsa --nsa-block 8 --nsa-stride 4 --nsa-select-block 8 --nsa-selected 3 --device cpu \
  --seq 48 --batch 1 --data random --steps 2
verdict "sparse attention begins with dense weights, and that is said in a line" \
  "$([ "$status" = 0 ] && grep -q "the three branches begin with its keys and values" "$dir/out" || echo "it does not")"
bad "a folder that is not there" "--init $dir/none|not a directory" --init "$dir/none"
bad "a preset beside a folder" "--preset tiny|test/hf-llama/config.json" --init test/hf-llama
cp -r test/hf-llama "$dir/damaged"
rm "$dir/damaged/model-00002-of-00002.safetensors"
mpi -np 2 ./train --init "$dir/damaged" --device cpu
judge "an index that names a file that is not there" "$dir/damaged/model.safetensors.index.json" "model-00002-of-00002.safetensors, which is not there"
mpi -np 2 ./train --plan --init test/hf-llama --dim 32 --device cpu
judge "a plan of a folder's model with another size" "--dim 32" "says 64"
# needs NAME MODULE...: python3 has them, or a test of this name is skipped.
needs() {
  local name=$1
  shift
  python3 -c "import ${*// /,}" 2>/dev/null && return
  skipped=$((skipped + 1))
  echo "skipped: $name: python3 lacks one of: $*"
  return 1
}
if needs "a Llama through transformers and back" torch,transformers,numpy; then
  timeout 200 python3 peers/hf_round_trip.py --work "$dir/round" --steps 5 --seq 64 --more "--device cpu" >"$dir/out" 2>&1
  status=$?
  verdict "transformers finds the loss that we printed" "$([ $status = 0 ] || echo "exit status $status")"
fi
if needs "exported models in PyTorch" torch,numpy; then
  wrong=""
  nsa="--nsa-block 8 --nsa-stride 4 --nsa-select-block 16 --nsa-selected 3 --nsa-window 12"
  i=0
  for with in "--arch rope $nsa" "--arch llama --nsa-phi mlp --nsa-gate mlp --rope-scaling llama3:8:1:4:16 $nsa" \
    "--arch simple --nsa-phi linear $nsa" "--arch rope --attn dense" "--arch simple --attn dense --tie-embeddings" "--arch mlp"; do
    i=$((i + 1))
    # shellcheck disable=SC2086
    mpi -np 2 ./train --device cpu --preset tiny --dim 64 --seq 64 --batch 1 --steps 2 --lr 0.01 --data README.md --val-data README.md \
      --val-every 2 --val-batches 1 --log "$dir/val.jsonl" --export "$dir/val-$i" --export-dtype fp32 $with
    ours=$(grep -o '"val_loss":[0-9.]*' "$dir/val.jsonl" | tail -n 1 | cut -d: -f2)
    theirs=$(python3 peers/read_export.py "$dir/val-$i" README.md --sequences 2 2>"$dir/out" | awk '/^loss/ { print $2 }')
    awk -v a="${ours:-nan}" -v b="${theirs:-nan}" 'BEGIN { exit !(a - b < 1e-5 && b - a < 1e-5 && a > 1) }' || wrong="$wrong; $with: $ours here, $theirs in PyTorch"
  done
  verdict "PyTorch finds our validation loss in what is exported" "${wrong#; }"
fi
# 63000 bytes hold 984 sequences of 64 tokens and the target behind them.
mpi -np 2 ./train "${run[@]:0:6}" --global-batch 60 --epochs 0.5 --data "$dir/mine/text" --log "$dir/epochs.jsonl"
verdict "half an epoch is the whole steps in it" \
  "$([ "$status" = 0 ] && [ "$(grep -c '"step":' "$dir/epochs.jsonl")" = 8 ] && grep -q '"steps":8,' "$dir/epochs.jsonl" || echo "they are not 8 steps of 60 sequences")"
# The program tunes and validates before its first step with the model that it then trains.
one=(--device cpu --preset tiny --seq 64 --data random --steps 2 --shard grad)
mpi -np 2 ./train "${one[@]}" --log "$dir/plain.jsonl"
mpi -np 2 ./train "${one[@]}" --val-every 1 --log "$dir/validated.jsonl"
first() { grep '"step":1,' "$1" | sed 's/.*"loss":\([^,]*\),.*/\1/'; }
verdict "a run that validates begins as one that does not" \
  "$([ -n "$(first "$dir/plain.jsonl")" ] && [ "$(first "$dir/plain.jsonl")" = "$(first "$dir/validated.jsonl")" ] || echo "its first loss is another")"
# A step is the same however its rows are dealt out: to one rank, two, or three with padding, in one micro-batch or more.
# So is a validation, which counts batches of the global size; 64 are all of the data, and the last of them is smaller.
dealt=(--device cpu --preset tiny --seq 64 --data "$dir/a/text.txt" --steps 3 --val-every 1 --global-batch 4)
losses_of() { grep '"step"' "$1" 2>/dev/null | sed 's/.*"loss":\([^,]*\),.*"val_loss":\([^,}]*\).*/\1 \2/'; }
wrong=""
for batches in 2 64; do
  : >"$dir/dealt"
  for how in 1 2 3 "1 --grad-accum 4" "3 --grad-accum 2 --batch 3"; do
    read -r -a how <<<"$how"
    mpi -np "${how[0]}" ./train "${dealt[@]}" --val-batches $batches "${how[@]:1}" --log "$dir/dealt.jsonl"
    [ -s "$dir/dealt" ] || losses_of "$dir/dealt.jsonl" >"$dir/dealt"
    losses_of "$dir/dealt.jsonl" | paste "$dir/dealt" - | awk '
      { a = $1 - $3; b = $2 - $4; n += NF == 4 && a * a < 1e-10 && b * b < 1e-10 } END { exit n != 3 }' ||
      wrong="$wrong; not with -np ${how[*]}: $(losses_of "$dir/dealt.jsonl" | xargs)"
  done
done
verdict "a step and a validation are the same for any ranks and micro-batches" "${wrong#; }"
# All of the data is 65 sequences: 16 batches and one sequence, or one batch.
for n in 4 65; do
  mpi -np 2 ./train "${dealt[@]:0:8}" --val-every 1 --val-batches 64 --steps 1 --lr 1e-9 --global-batch $n --log "$dir/dealt.jsonl"
  losses_of "$dir/dealt.jsonl"
done | awk '{ print $2 }' >"$dir/dealt"
verdict "a smaller batch at a validation's end counts as what it is" \
  "$(xargs <"$dir/dealt" | awk '{ d = $1 - $2; exit !(NF == 2 && d * d < 1e-10) }' || echo "it does not")"
# The learning rate of each step, beside its formula: linear warm-up, then a cosine from the peak to a part of it.
good "a learning rate" "step" --device cpu --preset tiny --seq 64 --steps 10 --lr 0.01 --min-lr-ratio 0.25 --warmup 3 --log "$dir/lr.jsonl"
sed -n 's/.*"lr":\([^,]*\),.*"step":\([0-9]*\).*/\2 \1/p' "$dir/lr.jsonl" >"$dir/out"
verdict "the learning rate is that of the schedule" "$(awk '
  { lr = $1 <= 3 ? 0.01 * $1 / 3 : 0.0025 + 0.0075 * (1 + cos(3.141592653589793 * ($1 - 3) / 7)) / 2
    n += $1 == NR && $2 > lr - 1e-9 && $2 < lr + 1e-9 } END { exit n != 10 }' "$dir/out" || echo "it is not")"
# The log of a run that goes on goes on, too.
cp "$dir/again.jsonl" "$dir/log.jsonl"
mpi -np 2 ./train "${run[@]}" --resume "$dir/saved/step-3" --stop-after 4 --log "$dir/log.jsonl"
wrong=""
[ "$status" = 0 ] || wrong="exit status $status"
[ "$(grep -c '"step":' "$dir/log.jsonl")" = 4 ] || wrong="$wrong; not three steps and then one more"
verdict "the log of a run that goes on" "${wrong#; }"
# Another way to shard.
mpi -np 4 ./train "${run[@]}" --resume "$dir/saved/step-3" --shard hybrid:2 --wrap sublayer --moments bf16 --tf32 \
  --accum-sync last --log "$dir/other.jsonl"
wrong=""
[ "$status" = 0 ] || wrong="exit status $status"
[ "$(losses "$dir/other.jsonl" | wc -l)" = 3 ] || wrong="$wrong; it did not run three more steps"
verdict "a run goes on in another way to shard" "${wrong#; }"
# What the command line leaves open comes from the checkpoint, so other ranks see the same data.
mpi -np 3 ./train --device cpu --preset tiny --seq 64 --resume "$dir/saved/step-6" --steps 8 --log "$dir/three.jsonl"
wrong=""
[ "$status" = 0 ] || wrong="exit status $status"
grep -q '"global_batch":3' "$dir/three.jsonl" || wrong="$wrong; the global batch is not the checkpoint's"
[ "$(losses "$dir/three.jsonl" | cut -d' ' -f1 | xargs)" = "7 8" ] || wrong="$wrong; it did not run steps 7 and 8"
verdict "a run goes on at another number of ranks" "${wrong#; }"
# All of it: with a checkpoint alone a run goes on as it was.
as=(--nsa-window 32 --nsa-selected 3 --rope-base 100 --lr 0.001 --clip 0.5 --val-every 2 --val-batches 2 --grad-accum 2 --seed 5)
mpi -np 2 ./train "${run[@]}" --log "$dir/as-whole.jsonl" "${as[@]}"
mpi -np 2 ./train "${run[@]}" --stop-after 3 --save "$dir/as" "${as[@]}"
mpi -np 2 ./train --device cpu --save "$dir/as" --resume latest --log "$dir/as-again.jsonl"
wrong=""
[ "$status" = 0 ] || wrong="exit status $status"
[ "$(losses "$dir/as-whole.jsonl" | wc -l)" = 3 ] || wrong="$wrong; the run did not log three more steps"
[ "$(losses "$dir/as-whole.jsonl")" = "$(losses "$dir/as-again.jsonl")" ] || wrong="$wrong; the losses are not those of the unbroken run"
[ "$(grep -o '"val_loss":.*' "$dir/as-whole.jsonl" | tail -n 2)" = "$(grep -o '"val_loss":.*' "$dir/as-again.jsonl")" ] ||
  wrong="$wrong; nor is what validation says"
! grep -q "differs from" "$dir/out" || wrong="$wrong; it says that something changed"
verdict "a run goes on as its checkpoint says" "${wrong#; }"
mpi -np 2 ./train "${run[@]}" --resume "$dir/saved" --heads 4
judge "a checkpoint of other heads" "--heads 4" "made with 2"
mpi -np 2 ./train "${run[@]}" --resume "$dir/saved" --dim 64
judge "a checkpoint of another shape" "embedding.weight" "manifest.json"
mpi -np 2 ./train --device cpu --preset tiny --seq 64 --steps 6 --resume "$dir/saved" --global-batch 4
judge "a checkpoint of another global batch" "--global-batch 3"
mpi -np 2 ./train "${run[@]}" --resume "$dir/none"
judge "no checkpoint" "$dir/none" "No such file"
# What diverges ends, and nothing of it is saved.
mpi -np 2 ./train --device cpu --preset tiny --seq 64 --steps 200 --lr 10 --clip 0 --weight-decay 10 --save "$dir/diverged" --save-every 5
judge "a run that diverges" "gradient norm" "diverged" "$dir/diverged"
mpi -np 2 ./train --device cpu --preset tiny --seq 64 --steps 200 --resume "$dir/diverged" --stop-after 1
verdict "a run that diverged leaves what can be loaded" "$(grep -q "resuming after step" "$dir/out" || echo "it does not go on")"
bad "save-every without save" "--save-every|--save DIR" --save-every 2
bad "a directory that nobody can write to" "--save|/proc/.lock" --save /proc
verdict "a save that cannot be is refused before training" "$(! grep -q "^step" "$dir/out" || echo "it trains")"
mpi -np 2 ./train "${run[@]}" --resume "$dir/saved" --log "$dir/saved/step-6/rank-0.bin"
judge "a log into a step" "--log $dir/saved/step-6/rank-0.bin" "inside a checkpoint in $dir/saved"
# A checkpoint that the program before this one made goes on, also without options that were not known then. Losses to
# what other processors round otherwise.
v1=(--device cpu --save "$dir/v1" --resume latest --log "$dir/v1.jsonl")
fresh() { rm -rf "$dir/v1" "$dir/v1.jsonl" && cp -a test/checkpoint-v1 "$dir/v1"; }
as_then() { # NAME: the run that went on from it did so with the losses that were recorded, and says no difference
  local wrong=""
  [ "$status" = 0 ] || wrong="exit status $status"
  grep '"step"' "$dir/v1.jsonl" | sed 's/.*"loss":\([^,]*\),.*"step":\([0-9]*\).*/\2 \1/' |
    awk '$1 == 3 { d = $2 - 5.580460 } $1 == 4 { d = $2 - 5.630047 } d < -1e-5 || d > 1e-5 || $1 != NR + 2 { bad = 1 }
      END { exit NR != 2 || bad }' ||
    wrong="$wrong; the losses are $(grep -o '"loss":[^,]*' "$dir/v1.jsonl" | xargs)"
  ! grep -q "not as in" "$dir/out" || wrong="$wrong; it says that something changed"
  verdict "$1" "${wrong#; }"
}
rewrite() { # JSON: what another program would have written into the manifest's state; null takes a key out
  TEST_MANIFEST=$dir/v1/step-2/manifest.json TEST_PATCH=$1 build/test_ranks "[.rewrite]" >"$dir/out" 2>&1
}
for n in 1 2 3; do
  fresh
  mpi -np $n ./train "${v1[@]}"
  as_then "a checkpoint of the program before goes on with $n ranks"
done
fresh
rewrite '{"options": {"rope_base": null, "clip_norm": null, "tie_embeddings": null, "attn": null, "warmup": null, "val_every": null}}'
mpi -np 2 ./train "${v1[@]}"
as_then "a checkpoint that does not know an option goes on"
fresh
rewrite '{"options": {"rope_base": "large"}}'
mpi -np 2 ./train "${v1[@]}"
judge "a checkpoint with an option of another type" "$dir/v1/step-2/manifest.json" '"rope_base"' '"large"'
# A directory holds one run.
mpi -np 2 ./train "${run[@]}" --save "$dir/saved"
judge "a save over another run" "--save $dir/saved" "step-6 is there" "--resume latest"
# Killed at any moment: whatever is there then can be resumed from.
wrong=""
resume=()
for delay in 0.1 0.4 0.8; do
  rm -f "$dir/out"
  # shellcheck disable=SC2086
  mpirun $MPIRUN_FLAGS -np 2 ./train --device cpu --preset tiny --seq 64 --global-batch 3 --steps 100000 \
    --save "$dir/killed" --save-every 1 "${resume[@]}" >"$dir/out" 2>&1 </dev/null &
  for ((i = 0; i < 200; i++)); do grep -qs "^step" "$dir/out" && break || sleep 0.1; done
  sleep $delay
  pkill -9 -f -- "--save $dir/killed" 2>/dev/null
  wait $! 2>/dev/null
  [ -e "$dir/killed/latest" ] && resume=(--resume latest)
done
mpi -np 2 ./train --device cpu --preset tiny --seq 64 --global-batch 3 --steps 100000 --minutes 0.01 --save "$dir/killed" --resume latest
[ "$status" = 0 ] && grep -q "resuming after step" "$dir/out" || wrong="it does not go on: exit status $status"
verdict "a killed run goes on from what it had saved" "$wrong"
# A save that fails while training goes on: here its directory is moved away. The run ends as it would have, but says
# that its last step is not saved.
# shellcheck disable=SC2086
timeout -k 5 $limit mpirun $MPIRUN_FLAGS -np 2 ./train --device cpu --preset tiny --seq 64 --steps 100000 --minutes 0.1 --save "$dir/here" \
  --save-every 5 >"$dir/out" 2>&1 </dev/null &
for ((i = 0; i < 100; i++)); do [ -e "$dir/here/latest" ] && break || sleep 0.1; done
mv "$dir/here" "$dir/there"
wait $!
status=$?
judge "a save that fails while training goes on" "saving step" "$dir/here" "No such file"
grep -q "warning: saving step .* training goes on" "$dir/out" && grep -q "minutes reached" "$dir/out" && wrong="" || wrong="training did not go on"
verdict "training goes on when a save fails" "$wrong"
# One rank alone is killed: the others do not wait for it.
run=(--device cpu --preset tiny --seq 64 --global-batch 3 --steps 100000 --save "$dir/alone" --save-every 5)
# shellcheck disable=SC2086
timeout -k 5 $limit mpirun $MPIRUN_FLAGS -np 3 ./train "${run[@]}" >"$dir/out" 2>&1 </dev/null &
for ((i = 0; i < 100; i++)); do [ -e "$dir/alone/latest" ] && break || sleep 0.1; done
pkill -9 -n -f -- "--save $dir/alone" 2>/dev/null
wait $! 2>/dev/null
status=$?
wrong=""
[ "$status" != 0 ] && [ "$status" != 124 ] || wrong="exit status $status"
# mpirun tells it, or a rank that saw it first and ended all.
grep -qE "signal 9|is gone, killed or crashed" "$dir/out" || wrong="$wrong; no rank was killed: $(tail -n 5 "$dir/out")"
mpi -np 2 ./train "${run[@]}" --minutes 0.01 --resume latest
[ "$status" = 0 ] && grep -q "resuming after step" "$dir/out" || wrong="$wrong; it does not go on: exit status $status"
verdict "a rank that is killed ends all" "${wrong#; }"

# ------------------------------------------------------------------------------------------------------------ text
# Many files: one order for any ranks, and the files that a checkpoint had.
t="$dir/text.d"
mkdir "$t"
head -c 21000 "$dir/mine/text" >"$t/part_0.txt"
tail -c +21001 "$dir/mine/text" | head -c 30 >"$t/part_1.txt"
tail -c +21031 "$dir/mine/text" >"$t/part_2.txt"
many=(--device cpu --preset tiny --seq 64 --global-batch 6 --steps 3)
mpi -np 2 ./train "${many[@]}" --data "$dir/mine/text" --log "$t/one.jsonl"
mpi -np 2 ./train "${many[@]}" --data "$t/part_*.txt" --log "$t/many.jsonl" --save "$t/saved" --stop-after 2
mpi -np 2 ./train "${many[@]}" --log "$t/rest.jsonl" --save "$t/saved" --resume latest
steps_of() { sed -n 's/.*"loss":\([^,]*\),.*"step":\([0-9]*\),.*/\2 \1/p' "$@"; }
wrong=""
[ "$(steps_of "$t/one.jsonl" | wc -l)" = 3 ] || wrong="not three steps"
[ "$(steps_of "$t/one.jsonl")" = "$(steps_of "$t/many.jsonl" "$t/rest.jsonl")" ] || wrong="$wrong; the losses are not those of one file that holds all"
verdict "three files are trained on as one, and resumed" "$wrong"
for n in 1 3 4; do
  mpi -np $n ./train "${many[@]}" --data "$t/part_*.txt" --log "$t/$n.jsonl"
  steps_of "$t/one.jsonl" | paste - <(steps_of "$t/$n.jsonl") | awk '{ d = $2 - $4; n += NF == 4 && d * d < 1e-10 } END { exit n != 3 }'
  verdict "three files are drawn in one order with $n ranks" "$([ $? = 0 ] || echo "the losses are $(steps_of "$t/$n.jsonl" | xargs), not $(steps_of "$t/one.jsonl" | xargs)")"
done
echo "one more" >"$t/part_3.txt"
mpi -np 2 ./train "${many[@]}" --resume "$t/saved"
judge "files that a checkpoint did not have" "--data $t/part_*.txt" "part_3.txt is new" "4 now, 3 then"
rm "$t/part_3.txt"
echo "longer" >>"$t/part_2.txt"
mpi -np 2 ./train "${many[@]}" --resume "$t/saved"
judge "a file that has grown since a checkpoint" "part_2.txt has 41977 tokens, and had 41970"
mv "$t/part_1.txt" "$t/moved"
mpi -np 2 ./train "${many[@]}" --resume "$t/saved"
judge "a file that a checkpoint had" "part_1.txt is missing"
bad "a pattern that nothing matches" "$t/none_*.bin|no file matches" --data "$t/none_*.bin"
bad "a file that is named twice" "part_0.txt is named twice" --data "$t/part_0.txt,$t/part_*.txt"
bad "files of different kinds" "$dir/tokens.bin|2 bytes a token and 1|differ" --data "$dir/tokens.bin,$t/part_0.txt"
bad "a log onto one of many files" "--log $t/part_0.txt|the same file as --data" --data "$t/part_*.txt" --log "$t/part_0.txt"
{ printf TOKENS02 && u16 2 0 300 0 200 0 0 0 0 0 0 0 65535 65535 0 0 && printf 'somebody' && head -c 208 /dev/zero && u16 $(seq 0 199); } >"$t/named.bin"
bad "a tokenizer with more tokens than the model" "$t/named.bin|vocabulary in its header, 300 (somebody)|256|--vocab 304" --data "$t/named.bin"
good "a tokenizer is named" "(uint16 tokens of somebody)" "${small[@]}" --data "$t/named.bin" --vocab 304

# What a model has learnt by heart it writes, in a window that moves on; with any ranks.
yes "the quick brown fox jumps over the lazy dog" | head -n 500 >"$t/fox.txt"
for n in 1 2 3; do
  mpi -np $n ./train --device cpu --preset tiny --seq 64 --global-batch 6 --steps 50 --lr 0.003 --data "$t/fox.txt" --prompt "the quick" \
    --sample 100 --temperature 0 --log "$t/fox.jsonl"
  head -c 109 "$t/fox.txt" >"$t/want"
  tr -d '\r' <"$dir/out" | sed -n '/^sample after step 50: /,$p' | sed '1s/^[^:]*: //' | head -c 109 | cmp -s - "$t/want"
  verdict "a text that was learnt is written by $n ranks" "$([ $? = 0 ] || echo "another is: $(tail -n 3 "$dir/out" | xargs -0)")"
done
# Samples and evaluations by initial weights, which are the same bits: so are they, with any ranks. 1231 bytes are 19
# windows of 64 and a shorter one; the questions are four, whose answers' means are 0 or more tokens apart.
head -c 1231 README.md >"$t/odd.txt"
question() { # RIGHT: of a context of 3 tokens and answers of 1, 2 and 5
  u16 65535 40 0 "$1" 3 3 5 6 7 1 8 2 9 10 5 11 12 13 14 15
}
{ u16 $((20240522 & 65535)) $((20240522 >> 16)) 1 0 3 0 40 0 && head -c 1008 /dev/zero && question 0 && question 1 && question 2; } >"$t/questions.bin"
ask=(--device cpu --preset tiny --seq 64 --batch 2 --stop-after 0)
: >"$t/found"
for n in 1 2 3 4; do
  mpi -np $n ./train "${ask[@]}" --sample 40 --temperature 1 --top-k 50 --prompt "Once" --eval "$t/odd.txt" --log "$t/asked.jsonl"
  mpi -np $n ./train "${ask[@]}" --eval "$t/questions.bin" --log "$t/answered.jsonl"
  grep -hE '^\{"(sample|eval)"' "$t/asked.jsonl" "$t/answered.jsonl" >"$t/found-$n"
  [ "$(wc -l <"$t/found-$n")" = 3 ] && cmp -s "$t/found-1" "$t/found-$n"
  verdict "a sample and evaluations with $n ranks" "$([ $? = 0 ] || echo "they are $(xargs -0 <"$t/found-$n"), not $(xargs -0 <"$t/found-1")")"
done
wrong=""
grep -q '"targets":1230}' "$t/found-1" || wrong="not 1230 targets"
grep -q '"questions":3,"right_norm":1}' "$t/found-1" || wrong="$wrong; not one of three questions is answered right, by whichever answer"
verdict "how many tokens and questions are evaluated" "${wrong#; }"
# Behind steps too, and from a checkpoint; a step's numbers are those of a run that was not asked.
mpi -np 2 ./train "${many[@]}" --data "$dir/mine/text" --sample 5 --sample-every 1 --save "$t/sampled" --log "$t/sampled.jsonl"
wrong=""
[ "$(steps_of "$t/sampled.jsonl")" = "$(steps_of "$t/one.jsonl")" ] || wrong="the losses are others"
[ "$(grep -o '"after_step":[0-9]*' "$t/sampled.jsonl" | xargs)" = "after_step:1 after_step:2 after_step:3" ] || wrong="$wrong; not once behind each step"
mpi -np 3 ./train --device cpu --preset tiny --seq 64 --resume "$t/sampled" --stop-after 0 --sample 5 --log "$t/again.jsonl"
[ "$(grep '^{"sample"' "$t/again.jsonl")" = "$(grep '^{"sample"' "$t/sampled.jsonl" | tail -n 1)" ] || wrong="$wrong; the checkpoint writes another"
verdict "samples behind steps, and from a checkpoint" "${wrong#; }"
mpi -np 2 ./train "${small[@]}" --eval "$t/odd.txt" --sample 3 --log "$t/memory.jsonl"
ran=$(head -n 1 "$t/memory.jsonl" | grep -o '"planned_peak_mib":[0-9.]*' | cut -d: -f2)
planned=$(./train --plan --world 2 "${small[@]}" --eval "$t/odd.txt" --sample 3 | awk '$1 == "arena" { print $2 }')
verdict "the plan knows of samples and evaluations" "$([ -n "$ran" ] && [ "$ran" = "$planned" ] || echo "planned $planned MiB, ran $ran")"
# Who is asked to stop does not evaluate for an hour first.
stop_it() { touch "$t/halted/.HALT"; }
long=(--device cpu --preset tiny --seq 64 --batch 1 --steps 1000000 --minutes 0.3 --eval "$t/odd.txt" --save "$t/halted")
mpi_until stop_it
verdict "a run that is asked to stop evaluates nothing" "$(grep -q 'eval and --sample are left out: ' "$dir/out" && ! grep -q '^evaluated' "$dir/out" || echo "it does, or does not say so")"
bad "a prompt without a sample" "--prompt|--sample N" --prompt "Once"
bad "samples every so often of nothing" "--sample-every|--sample N" --sample-every 2
bad "a prompt of no token ids" "--prompt|'Once'|299" --data "$t/named.bin" --vocab 304 --sample 3 --prompt "Once 3"
bad "nothing to begin a sample with" "--sample|--prompt" --data random --sample 3
bad "an evaluation of what is not there" "$t/none|No such file" --eval "$t/none"
head -c 1100 "$t/questions.bin" >"$t/cut.bin"
bad "questions that are cut" "--eval $t/cut.bin|question 1|byte 1100|ends before" --eval "$t/cut.bin"
bad "training on questions" "$t/questions.bin|--eval" --data "$t/questions.bin"
bad "a log onto what is evaluated" "--log $t/odd.txt|the same file as --eval" --eval "$t/odd.txt" --log "$t/odd.txt"

# Text to tokens and back.
python=$(command -v python3)
to_tokens() { # OPTION...: prepare.py in $t, output in $dir/out
  (cd "$t" && timeout -k 5 $limit "$python" "$OLDPWD/data/prepare.py" "$@") >"$dir/out" 2>&1 </dev/null
  status=$?
}
# For each tokenizer: the same tokens from one process and from two, cut into files or not, and the text comes back.
round_trip() { # NAME OPTION...
  local name=$1 wrong=""
  shift
  rm -f "$t"/rt*.bin
  to_tokens a.txt b.jsonl "$@" --workers 1 --out rt.bin
  [ "$status" = 0 ] || wrong="exit status $status"
  to_tokens a.txt b.jsonl "$@" --workers 2 --out rt2.bin
  cmp -s "$t/rt.bin" "$t/rt2.bin" || wrong="$wrong; two processes write something else"
  to_tokens a.txt b.jsonl "$@" --shard-tokens 100000 --out rts.bin
  tail -q -c +257 "$t"/rts_*.bin | cmp -s - <(tail -c +257 "$t/rt.bin") || wrong="$wrong; shards hold something else"
  (cd "$t" && "$python" "$OLDPWD/data/decode.py" rt.bin "$@") >"$t/back" 2>"$dir/out"
  cmp -s "$t/back" "$t/text-of-all" || wrong="$wrong; another text comes back"
  verdict "text to tokens and back, $name" "${wrong#; }"
}
if [ -n "$python" ]; then
  # More than a piece, with and without ends of lines, and documents; é and 東 are two and three bytes.
  { for i in $(seq 1 45000); do echo "line $i of 東京, é"; done && for i in $(seq 1 60000); do printf '%s東東東東東東東東' "$i"; done; } >"$t/a.txt"
  for i in $(seq 1 300); do echo "{\"text\": \"document $i:\\n caf\\u00e9 \\ud83d\\ude00\", \"n\": 3}"; done >"$t/b.jsonl"
  echo '{"text": ""}' >>"$t/b.jsonl"
  { cat "$t/a.txt" && echo && for i in $(seq 1 300); do printf 'document %s:\n café 😀\n' "$i"; done; } >"$t/text-of-all"
  round_trip bytes
  printf 'one<|end|>\ntwo\nlines<|end|>three' >"$t/parts.txt"
  to_tokens parts.txt --separator '<|end|>' --out parts.bin
  verdict "a separator ends documents" "$([ "$(tail -c +257 "$t/parts.bin" | tr '\0' '|')" = $'one|two\nlines|three|' ] || echo "not so: $(tail -c +257 "$t/parts.bin" | tr '\0' '|')")"
  mpi -np 2 ./train "${small[@]}" --data "$t/rts_*.bin" --eval "$t/parts.bin" --sample 5 --log "$t/bytes.jsonl"
  verdict "files of prepare.py are trained on" "$([ "$status" = 0 ] && grep -q "files, bytes of bytes)" "$dir/out" && grep -q '"bits_per_byte":[0-9]' "$t/bytes.jsonl" || echo "they are not")"
  to_tokens a.txt --out rt.bin
  judge "tokens over a file that is there" "rt.bin exists"
  printf '{"text": "a"}\n{"txt": "b"}\n' >"$t/bad.jsonl"
  to_tokens bad.jsonl --out none.bin
  judge "a JSON line without text" 'bad.jsonl:2' '"text"' "--field"
  printf '{"text": "a"}\n{"text":\n' >"$t/bad.jsonl"
  to_tokens bad.jsonl --out none.bin
  judge "a line that is no JSON" 'bad.jsonl:2' "not JSON"
  printf 'zero \0 byte' >"$t/zero.txt"
  to_tokens zero.txt --out none.bin
  judge "bytes that end documents in one" "zero.txt" "byte 5 of it is 0"
  to_tokens none.txt --out none.bin
  judge "no text file" "none.txt" "No such file"
  verdict "what fails leaves nothing" "$(cd "$t" && find . -name 'none*')"
  "$python" data/decode.py "$t/rt.bin" --tokenizer none.json >"$dir/out" 2>&1
  status=$?
  judge "a tokenizer that is not there" "none.json"
else
  skipped=$((skipped + 1))
  echo "skipped: text to tokens: there is no python3"
fi
# A tokenizer.json of bytes, two merges and a special token, whose text stands in a document too.
if "$python" -c 'import tokenizers' 2>/dev/null; then
  "$python" - "$t/tokenizer.json" <<'END'
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocab = {c: i for i, c in enumerate(letters + ["in", "lin"])}
made = Tokenizer(models.BPE(vocab, [("i", "n"), ("l", "in")]))
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
made.add_special_tokens(["<|endoftext|>"])
made.save(sys.argv[1])
END
  round_trip tokenizers --tokenizer tokenizer.json
  # 259 tokens: two bytes each; "lin" is one, and what looks like the special token is text.
  printf 'lin<|endoftext|>' >"$t/special.txt"
  to_tokens special.txt --tokenizer tokenizer.json --out special.bin
  verdict "a special token's text is text" "$([ "$(wc -c <"$t/special.bin")" = $((256 + 2 * (1 + 13 + 1))) ] || echo "$(wc -c <"$t/special.bin") bytes")"
  mpi -np 2 ./train "${small[@]}" --data "$t/rt.bin"
  judge "a tokenizer.json that is larger than the model" "$t/rt.bin" "259 (tokenizer.json sha256:" "--vocab 264"
  mpi -np 2 ./train "${small[@]}" --vocab 264 --data "$t/rt.bin" --sample 4 --eval "$t/special.bin" --log "$t/ids.jsonl"
  cp "$dir/out" "$t/told"
  "$python" data/decode.py --tokenizer "$t/tokenizer.json" <"$t/told" >"$dir/out" 2>&1
  verdict "samples are decoded" "$([ "$(grep -cE '^sample after step 2: ([0-9]+ ?)+' "$t/told")" = 1 ] && ! grep -qE '^sample after step 2: ([0-9]+ ?)+$' "$dir/out" && grep -q '^step  *2/2' "$dir/out" || echo "they are not")"
  to_tokens a.txt --tokenizer tokenizer.json --end-token '<none>' --out none.bin
  judge "an end token that there is not" "<none>" "--end-token"
  "$python" data/decode.py "$t/rt.bin" >"$dir/out" 2>&1
  status=$?
  judge "a token file of another tokenizer" "$t/rt.bin" "tokenizer.json sha256:" "bytes"
else
  skipped=$((skipped + 1))
  echo "skipped: a tokenizer.json: Python's package tokenizers is not here"
fi
if "$python" -c 'import tiktoken' 2>/dev/null; then
  mkdir -p "$t/plugins/tiktoken_ext"
  cat >"$t/plugins/tiktoken_ext/small.py" <<'END'
def small():
    ranks = {bytes([i]): i for i in range(256)} | {b"li": 256, b"lin": 257}
    return {"name": "small", "pat_str": r"\S+|\s+", "mergeable_ranks": ranks, "special_tokens": {"<|endoftext|>": 258}}


ENCODING_CONSTRUCTORS = {"small": small}
END
  export PYTHONPATH="$t/plugins${PYTHONPATH:+:$PYTHONPATH}"
  round_trip tiktoken --tiktoken small
  to_tokens a.txt --tiktoken none --out none.bin
  judge "an encoding that there is not" "--tiktoken none"
else
  skipped=$((skipped + 1))
  echo "skipped: an encoding of tiktoken: Python's package tiktoken is not here"
fi

# ------------------------------------------------------------------------------------------- builds that are not here
env -u MAKEFLAGS -u MAKELEVEL make --no-print-directory syntax >"$dir/out" 2>&1 # not a part of the make that runs this
status=$?
wrong=""
[ "$status" = 0 ] || wrong="exit status $status"
! grep -q "[0-9]: warning:" "$dir/out" || wrong="$wrong; it has warnings"
verdict "compiles without CUDA and NCCL" "${wrong#; }"

# --------------------------------------------------------------------------------------------------------- the notes
# NOTES.md leads to lines by [`name`](file#Lnumber): the line must have the name in it.
wrong=""
: >"$dir/out"
while IFS='|' read -r name file line; do
  sed -n "${line}p" "$file" 2>/dev/null | grep -qF -- "$name" || wrong="$wrong; $name is not at $file:$line"
done < <(grep -o '\[`[^`]*`\]([^)#]*#L[0-9]*)' NOTES.md | sed 's/^\[`\([^`]*\)`\](\([^#]*\)#L\([0-9]*\))$/\1|\2|\3/')
verdict "the lines that NOTES.md leads to" "${wrong#; }"

echo "RESULT $passed $failed $skipped"
[ "$failed" = 0 ]

#!/bin/bash
# Data files, one and many; samples and evaluations.
# shellcheck source=common.sh
. "${BASH_SOURCE[0]%/*}/common.sh"

mkfifo "$dir/fifo"
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

# Many files: one order for any ranks, and the files that a checkpoint had.
t="$dir/text.d"
mkdir "$t" "$dir/mine"
prose 3000 >"$dir/mine/text"
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
judge "a file that has grown since a checkpoint" "part_2.txt, file 3, has 41977 tokens, and had 41970"
mv "$t/part_1.txt" "$t/moved"
mpi -np 2 ./train "${many[@]}" --resume "$t/saved"
judge "a file that a checkpoint had" "part_1.txt is missing"
bad "a pattern that nothing matches" "$t/none_*.bin|no file matches" --data "$t/none_*.bin"
bad "a file that is named twice" "part_0.txt is named twice" --data "$t/part_0.txt,$t/part_*.txt"
bad "a file that is named in two ways" "part_0.txt is named twice" --data "$t/part_0.txt,$t/./part_0.txt"
bad "files of different kinds" "$dir/tokens.bin|2 bytes a token and 1|differ" --data "$dir/tokens.bin,$t/part_0.txt"
bad "a log onto one of many files" "--log $t/part_0.txt|the same file as --data" --data "$t/part_*.txt" --log "$t/part_0.txt"
{ printf TOKENS02 && u16 2 0 300 0 200 0 0 0 0 0 0 0 65535 65535 0 0 && printf 'somebody' && head -c 208 /dev/zero && u16 $(seq 0 199); } >"$t/named.bin"
bad "a tokenizer with more tokens than the model" "$t/named.bin|vocabulary in its header, 300 (somebody)|256|--vocab 304" --data "$t/named.bin"
for option in --val-data --eval; do
  bad "$option of another tokenizer" "--data $t/named.bin and $option $t/part_0.txt differ: the tokenizer somebody and bytes" --data "$t/named.bin" \
    --vocab 304 --val-every 1 $option "$t/part_0.txt"
done
bad "validation of another tokenizer than the built-in corpus" "the built-in corpus (--data) and --val-data $t/named.bin differ" --vocab 304 --val-every 1 --val-data "$t/named.bin"
mpi -np 2 ./train "${small[@]}" --data "$t/named.bin" --vocab 304 --save "$t/of-named"
mpi -np 2 ./train "${small[@]}" --data "$dir/mine/text" --vocab 304 --resume "$t/of-named"
judge "data of another tokenizer than the checkpoint's" "the data of $t/of-named/step-2 and --data $dir/mine/text differ"
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
verdict "how many tokens and questions are evaluated" "$wrong"
# Behind steps too, and from a checkpoint; a step's numbers are those of a run that was not asked.
mpi -np 2 ./train "${many[@]}" --data "$dir/mine/text" --sample 5 --sample-every 1 --save "$t/sampled" --log "$t/sampled.jsonl"
wrong=""
[ "$(steps_of "$t/sampled.jsonl")" = "$(steps_of "$t/one.jsonl")" ] || wrong="the losses are others"
[ "$(grep -o '"after_step":[0-9]*' "$t/sampled.jsonl" | xargs)" = "after_step:1 after_step:2 after_step:3" ] || wrong="$wrong; not once behind each step"
mpi -np 3 ./train --device cpu --preset tiny --seq 64 --resume "$t/sampled" --stop-after 0 --sample 5 --log "$t/again.jsonl"
[ "$(grep '^{"sample"' "$t/again.jsonl")" = "$(grep '^{"sample"' "$t/sampled.jsonl" | tail -n 1)" ] || wrong="$wrong; the checkpoint writes another"
verdict "samples behind steps, and from a checkpoint" "$wrong"
mpi -np 2 ./train "${small[@]}" --eval "$t/odd.txt" --sample 3 --log "$t/memory.jsonl"
ran=$(head -n 1 "$t/memory.jsonl" | grep -o '"planned_peak_mib":[0-9.]*' | cut -d: -f2)
planned=$(./train --plan --world 2 "${small[@]}" --eval "$t/odd.txt" --sample 3 | awk '$1 == "arena" { print $2 }')
verdict "the plan knows of samples and evaluations" "$([ -n "$ran" ] && [ "$ran" = "$planned" ] || echo "planned $planned MiB, ran $ran")"
# Who is asked to stop does not evaluate for an hour first.
stop_it() { touch "$t/halted/.HALT"; }
mpi_until "" stop_it --eval "$t/odd.txt" --save "$t/halted"
verdict "a run that is asked to stop evaluates nothing" "$(grep -q 'eval and --sample are left out: ' "$dir/out" && ! grep -q '^evaluated' "$dir/out" || echo "it does, or does not say so")"
# One signal while a long text is evaluated, and a file that comes then: all is saved by now.
yes "all work and no play" | head -n 200000 >"$t/long.txt"
behind_steps() { # COMMAND OPTION...
  local command=$1
  shift
  rm -f "$dir/out"
  # shellcheck disable=SC2086 # a list of flags
  timeout -k 5 $limit mpirun $MPIRUN_FLAGS -np 2 ./train "${small[@]}" "$@" >"$dir/out" 2>&1 </dev/null &
  run=$!
  await '^step *2/2'
  $command
  wait $run
  status=$?
}
interrupt() { # once the last step is saved, and a little later the evaluation has begun
  appears "$t/evaluated/latest"
  sleep 0.5
  pkill -TERM -n -f -- "--save $t/evaluated"
}
behind_steps interrupt --eval "$t/long.txt" --save "$t/evaluated"
judge "a signal while a text is evaluated" "ended by a signal after the last step"
verdict "what was saved before is there" "$([ -s "$t/evaluated/step-2/manifest.json" ] || echo "it is not")"
touch_halt() { touch "$t/halted-late/.HALT"; }
head -n 6000 "$t/long.txt" >"$t/seconds.txt" # of evaluation, in which the file comes
behind_steps touch_halt --eval "$t/seconds.txt" --save "$t/halted-late"
verdict "a .HALT that comes too late is not the next run's" "$([ "$status" = 0 ] && [ ! -e "$t/halted-late/.HALT" ] || echo "status $status, or it is still there")"
bad "a prompt without a sample" "--prompt|--sample N" --prompt "Once"
bad "samples every so often of nothing" "--sample-every|--sample N" --sample-every 2
bad "a prompt of no token ids" "--prompt|'Once'|299" --data "$t/named.bin" --vocab 304 --sample 3 --prompt "Once 3"
bad "nothing to begin a sample with" "--sample|--prompt" --data random --sample 3
bad "an evaluation of what is not there" "$t/none|No such file" --eval "$t/none"
head -c 1100 "$t/questions.bin" >"$t/cut.bin"
bad "questions that are cut" "--eval $t/cut.bin|question 1|byte 1100|ends before" --eval "$t/cut.bin"
bad "training on questions" "$t/questions.bin|--eval" --data "$t/questions.bin"
bad "a log onto what is evaluated" "--log $t/odd.txt|the same file as --eval" --eval "$t/odd.txt" --log "$t/odd.txt"

done_testing

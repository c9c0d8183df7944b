#!/bin/bash
# What a step computes: the same for any ranks, and what the options say.
# shellcheck source=common.sh
. "${BASH_SOURCE[0]%/*}/common.sh"

prose 2000 >"$dir/short"
prose 3000 >"$dir/long"
# 63000 bytes hold 984 sequences of 64 tokens and the target behind them.
mpi -np 2 ./train --device cpu --preset tiny --seq 64 --global-batch 60 --epochs 0.5 --data "$dir/long" --log "$dir/epochs.jsonl"
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
dealt=(--device cpu --preset tiny --seq 64 --data "$dir/short" --steps 3 --val-every 1 --global-batch 4)
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
verdict "a step and a validation are the same for any ranks and micro-batches" "$wrong"
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

# Every number of the optimizer has its part in the third loss.
third() {
  mpi -np 1 ./train --device cpu --preset tiny --seq 64 --steps 3 --warmup 0 --log "$dir/knob.jsonl" "$@"
  sed -n 's/.*"loss":\([^,]*\),.*"step":3,.*/\1/p' "$dir/knob.jsonl"
}
plain=$(third) bounded=$(third --clip 1e-3)
wrong=""
for knob in "--lr 1e-4" "--beta1 0.1" "--beta2 0.1" "--eps 1" "--weight-decay 9" "--min-lr-ratio 0.9"; do
  read -r -a words <<<"$knob"
  loss=$(third "${words[@]}")
  [ -n "$loss" ] && [ "$loss" != "$plain" ] || wrong="$wrong; not $knob: ${loss:-none}"
done
for knob in "--clip 1e-9" "--clip 1e-3 --clip-norm inf"; do
  read -r -a words <<<"$knob"
  loss=$(third --eps 1e-3 "${words[@]}")
  [ -n "$loss" ] && [ "$loss" != "$(third --eps 1e-3 --clip 1e-3)" ] || wrong="$wrong; not $knob: ${loss:-none}"
done
[ -n "$plain" ] && [ -n "$bounded" ] && [ "$bounded" != "$plain" ] || wrong="$wrong; not --clip: $plain, $bounded"
verdict "what the optimizer is told changes the steps" "$wrong"

# cuBLAS is for GPUs: --help and a run on a CPU do not wait for it; --version, which names its version, does.
loads() {
  CUDA_VISIBLE_DEVICES='' LD_DEBUG=files timeout "$limit" ./train "$@" 2>&1 </dev/null |
    grep -ac 'calling init: .*/libcublasLt\.so'
}
if ./train --version | grep -q 'cuBLASLt [0-9]'; then
  times="$(loads --help) $(loads "${small[@]}" --allow-single-rank) $(loads --version)"
  verdict "a run on a CPU does not load cuBLAS" "$([ "$times" = "0 0 1" ] || echo "--help, a run and --version load it $times times")"
fi

done_testing

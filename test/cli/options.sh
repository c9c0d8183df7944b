#!/bin/bash
# Options: what is refused, in one line from all ranks, and where options may come from.
# shellcheck source=common.sh
. "${BASH_SOURCE[0]%/*}/common.sh"

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
bad "a timeout too short to tell who" "--timeout 0.2|give 2 seconds or more" --timeout 0.2
verdict "nor is MPI's start timed by it" "$([ "$status" = 2 ] || echo "exit status $status")"
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
bad "log that cannot be written" "--log $dir/none/log|no directory" --log "$dir/none/log"
if [ -w /dev/full ]; then
  for words in --help --list-presets "--plan --device cpu" "--device cpu --preset tiny --seq 64 --batch 1 --stop-after 0 --sample 5"; do
    # shellcheck disable=SC2086 # words
    ./train $words >/dev/full 2>"$dir/out"
    status=$?
    judge "$words to a full disk" "standard output cannot be written"
  done
fi
printf '\357\273\277steps = 4\n' >"$dir/marked.toml"
good "a file of options that an editor has marked as UTF-8" "4 steps" "${small[@]:0:6}" --config "$dir/marked.toml"
bad "two answers at a time" "--hardware and --plan|one at a time" --plan --hardware
bad "two others" "--show-params and --show-schedule|one at a time" --show-schedule --show-params
good "a plan with its schedule" "all_gather" --plan --show-schedule --world 2 "${small[@]}"
bad "groups that do not divide the ranks" "--shard hybrid:3|2 ranks" --shard hybrid:3
bad "a way to shard that there is not" "--shard some|full|hybrid:K" --shard some
for given in "--eps 1e-46" "--clip 1e-46" "--beta1 0.99999999" "--beta2 0.99999999" "--lr 1e-50"; do
  # shellcheck disable=SC2086 # words
  bad "$given, which is another number in fp32" "$given: in fp32" $given
done
for keeps in "--shard grad" "--shard none" "--reshard-after-forward 0"; do
  # shellcheck disable=SC2086 # words
  bad "prefetching what is there, with $keeps" "--backward-prefetch: without resharding" $keeps --backward-prefetch post
done
good "sums over one micro-batch" "note: --accum-sync last has no effect" "${small[@]}" --accum-sync last
bad "no limit that there is" "--limit-all-gathers 0|64|off" --limit-all-gathers 0
bad "more thread blocks than there are" "--reduce-ctas 65|0 to 64" --reduce-ctas 65
bad "NCCL's thread blocks where MPI reduces" "--reduce-ctas 4|NCCL|MPI" --reduce-ctas 4
bad "a limit where all stay" "--limit-all-gathers" --shard grad --limit-all-gathers 3
bad "resharding what stays whole" "--shard none|--reshard-after-forward 1" --shard none --reshard-after-forward 1
bad "sizes of units without auto" "--wrap auto" --wrap-min-params 5
bad "AdamW in the backward pass with clipping" "--optimizer-in-backward 1|--clip 0" --optimizer-in-backward 1
bad "attention kept where it is kept anyway" "--keep-attention 1|--recompute" --keep-attention 1 --recompute mlp
bad "passes over what has no end" "--epochs 2|--data random" --epochs 2 --data random
bad "passes and tokens" "--epochs|--tokens" --epochs 2 --tokens 1000
bad "less than a step of the data" "--epochs 1e-05|of a step" --epochs 0.00001
bad "save-every without save" "--save-every|--save DIR" --save-every 2
bad "steps kept of none that are saved" "--keep needs --save DIR" --keep 3
bad "a type of no export" "--export-dtype needs --export PATH" --export-dtype fp32
bad "positions of no config.json" "--max-positions needs --export DIR" --max-positions 64 --export "$dir/model.safetensors"
bad "sparse attention's sizes for dense" "--nsa-window needs --attn nsa; this run has dense attention" --attn dense --nsa-window 8
bad "heads where there are none" "--head-dim: architecture mlp has no attention" --arch mlp --head-dim 64
bad "heads that make no width" "--dim 128 is not divisible by --heads 3; give --head-dim" --heads 3 --kv-heads 1
bad "values in odd widths" "--v-head-dim 60 is not a multiple of 8" --v-head-dim 60
bad "RoPE where there is none" "--rope-base: architecture simple has no RoPE" --arch simple --rope-base 10000
bad "no name of what is frozen" "--freeze ,|no parameter" --freeze ,
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
  skip "--device gpu without a GPU: there is one here"
fi

done_testing

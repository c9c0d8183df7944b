#!/bin/bash
# What is told instead of training: help, hardware, parameters, and the plan, which says what a run then takes.
# shellcheck source=common.sh
. "${BASH_SOURCE[0]%/*}/common.sh"

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
./train --device cpu --preset tiny --show-params >"$dir/out" 2>&1
verdict "columns of parameters stand below each other" \
  "$(awk 'NR == 1 { at = index($0, "decay") } / (yes|no)$/ && match($0, /(yes|no)$/) != at' "$dir/out")"
good "a chip for a plan of a CPU" "--gpu h200 has no effect: a step on a CPU is not estimated" --plan --gpu h200 --device cpu --preset tiny
good "a plan of one rank" "slowdown from kernels beside it" --plan --gpu h200 --world 1 --preset rope
verdict "a plan of one rank has no links" "$(grep -E "links|into the network|collectives beside" "$dir/out")"
good "plan for a model that is not here" "MiB" --plan --world 8 --preset llama-8b
good "time of a step on ranks that are not here" "tokens/s a GPU" --plan --gpu h200 --world 4096 --preset llama-8b
good "what to change so that it fits" "the cheapest change that fits: --moments bf16" --plan --preset llama-8b --gpu h200 --seq 16384
good "a knob to put back so that it fits" "the cheapest change that fits: --wrap block:" --plan --preset llama-8b --gpu h100 --world 4 --wrap single
good "a cheaper knob to put back" "the cheapest change that fits: --accum-sync every:" --plan --preset llama-8b --gpu h100 --world 8 --grad-accum 2 --accum-sync last
good "what three communicators take beside a plan" "141, of which CUDA and NCCL take 1.5" --plan --preset llama-47b --gpu h200 --world 8 --shard hybrid:4
good "and what four take" "141, of which CUDA and NCCL take 1.8" --plan --preset llama-47b --gpu h200 --world 8 --shard hybrid:4 --reduce copy-engine
good "that ranks which fetch need none for an exchange" "141, of which CUDA and NCCL take 1.5" --plan --preset llama-47b --gpu h200 --world 8 --shard hybrid:2 --reduce copy-engine
good "products in fp8" "rope with NSA: 1.0 G parameters, bf16, matmuls in fp8" --plan --preset rope --gpu h200 --matmul-dtype fp8
judge_plan "fp8 on a GPU without it" "--matmul-dtype fp8: A100 has no fp8" --preset rope --gpu a100 --matmul-dtype fp8
good "products in fp8 scaled by row" "bf16, matmuls scaled by row in fp8" --plan --preset rope --gpu h200 --matmul-dtype fp8 --fp8-scaling row
judge_plan "rows scaled where cuBLAS cannot" "--fp8-scaling row: cuBLASLt supports it on compute capability 9.0 only (H100, H200), not on L40S" --preset rope --gpu l40s --matmul-dtype fp8 --fp8-scaling row
judge_plan "rows of nothing in fp8" "add --matmul-dtype fp8" --preset rope --gpu h200 --fp8-scaling row
good "blocks gathered in fp8" "bf16, matmuls, gathers and saved hidden layers in fp8" --plan --preset rope --gpu h200 --matmul-dtype fp8 --gather-dtype fp8 --save-dtype fp8
judge_plan "gathers of what is not multiplied in fp8" "add --matmul-dtype fp8" --preset rope --gpu h200 --gather-dtype fp8
judge_plan "fp8 gathers of units that are mostly something else" "use --wrap block" --preset rope --gpu h200 --matmul-dtype fp8 --gather-dtype fp8 --wrap single --world 2
judge_plan "fp8 gathers of rows" "drop --fp8-scaling row" --preset rope --gpu h200 --matmul-dtype fp8 --gather-dtype fp8 --fp8-scaling row
judge_plan "fp8 gathers of what is frozen" "drop --freeze" --preset rope --gpu h200 --matmul-dtype fp8 --gather-dtype fp8 --freeze embedding
judge_plan "gathers in fp8 and in fp32" "--autocast gathers in fp32" --preset rope --gpu h200 --matmul-dtype fp8 --gather-dtype fp8 --autocast bf16
judge_plan "fp8 of an odd width" "the width of q, k, v and NSA's gates" --preset m7c --gpu h200 --matmul-dtype fp8
judge_plan "fp8 of an odd number of tokens" "--batch x --seq = 1000 is not a multiple of 16" --preset rope --batch 1 --seq 1000 --gpu h200 --matmul-dtype fp8
judge_plan "fp8 of fp32 on a GPU" "drop --param-dtype fp32" --preset rope --gpu h200 --matmul-dtype fp8 --param-dtype fp32
good "a hidden layer saved in fp8" "bf16, matmuls and saved hidden layers in fp8" --plan --preset rope --gpu h200 --matmul-dtype fp8 --save-dtype fp8
wide=(--preset rope --heads 64 --kv-heads 4 --head-dim 192)
judge_plan "keys of 192 with values as wide" "--head-dim 192: bf16 attention on a GPU supports 64 and 128, and 192 with --v-head-dim 128" "${wide[@]}" --gpu h200
judge_plan "keys and values of widths without a kernel" "--head-dim 192 with --v-head-dim 64: on a GPU" "${wide[@]}" --v-head-dim 64 --gpu h200
judge_plan "wide keys where blocks have little shared memory" "--head-dim 192: its kernels need more than the 99 KiB of shared memory that a block has on L40S" "${wide[@]}" --v-head-dim 128 --gpu l40s
judge_plan "fp8 saved on a GPU without it" "--save-dtype fp8: A100 has no fp8" --preset rope --gpu a100 --save-dtype fp8
judge_plan "nothing there to save" "--recompute none and attn keep; drop one" --preset rope --gpu h200 --save-dtype fp8 --recompute both
good "units of a plan" "block.0 to block.31" --plan --world 8 --preset llama-8b
good "frozen" "frozen" --show-params --preset tiny --freeze embedding
good "how much is frozen" " parameters (32.8 k frozen)" --plan --preset tiny --freeze embedding

# Rows of the last block's hidden layer are kept only where that takes no memory: a larger vocabulary, which ends that,
# takes no less.
no_less() { # NAME LESS MORE OPTION...: arenas with vocabularies of LESS and MORE
  local name=$1 vocab arena=()
  for vocab in "$2" "$3"; do
    arena+=("$(./train --plan --device gpu --gpu h200 --world 8 --data random --recompute mlp --depth 2 --seq 4096 --batch 8 --vocab "$vocab" "${@:4}" | awk '$1 == "arena" { print int($2) }')")
  done
  verdict "$name" "$([ "${arena[0]:-1}" -le "${arena[1]:-0}" ] || echo "${arena[0]} and ${arena[1]} MiB")"
}
tall=(--arch rope --dim 4096 --heads 32 --kv-heads 32 --attn dense --hidden 16384)
no_less "memory by vocabulary, recomputed" 32768 34000 "${tall[@]}"
no_less "memory by vocabulary, recomputed, MLP frozen" 32768 34000 "${tall[@]}" --freeze block.1.mlp.up,block.1.mlp.down
no_less "memory by vocabulary, recomputed, fp32 gradients" 32768 34000 "${tall[@]}" --reduce-dtype fp32
no_less "memory by vocabulary, recomputed, no attention" 4096 4104 --arch mlp --dim 1024 --hidden 4096

# All micro-batches but the first and the last follow one plan of memory.
for with in "" "--autocast bf16" "--param-dtype fp32" "--accum-sync last" "--optimizer-in-backward 1 --clip 0" "--tie-embeddings"; do
  # shellcheck disable=SC2086
  good "five micro-batches of ranks that fetch $with" "largest buffer" --plan --gpu h200 --world 2 --preset class --grad-accum 5 --reduce copy-engine $with
done

good "schedule" "one rank: nothing moves" --show-schedule --world 1 --preset tiny
# Every knob of sharding reaches the step: how often something is in the schedule and the plan with it, and without it.
# Without numbers of lines and MiB of what moves, and with one blank between words.
told() {
  local preset=(--preset tiny) gpu=(--gpu h200)
  [[ " $* " != *" --preset "* ]] || preset=()
  [[ " $* " != *" --gpu "* ]] || gpu=()
  ./train --plan --show-schedule "${gpu[@]}" --world 4 "${preset[@]}" "$@" 2>&1 | sed -E 's/^ +[0-9]+  (gather|reduce|compute) /\1 /
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
knob 'waiting for gathers 0.0[0-4]' 0 1 --forward-prefetch 0
knob 'reduce_scatter head [^;]*;gather all_gather block.0' 0 1 --backward-prefetch post
knob 'reduce_scatter block.1 [^;]*;gather all_gather block.0' 1 0 --backward-prefetch none
knob 'all_gather [a-z.0-9]+ fp32' 5 0 --param-dtype fp32
knob 'reduce_scatter [a-z.0-9]+ fp32' 4 0 --reduce-dtype fp32
knob 'all_gather [a-z.0-9]+ fp32' 5 0 --autocast bf16
knob ' moments 0.0 0.5 .*moments in bf16;' 1 0 --moments bf16
knob 'compute recompute MLP block' 1 0 --recompute mlp
knob 'compute recompute attention block' 2 0 --recompute attn
knob 'compute recompute (MLP|attention) block' 3 0 --recompute both
knob 'recompute attention block.0;compute recompute MLP' 1 0 --recompute block
knob 'sum 0.5 63.8 67.1;' 1 0 --recompute attn --keep-attention 1
knob 'activations 0.0 0.0 3.0;' 1 0 --save-dtype fp8
knob 'reduce_scatter ' 8 4 --grad-accum 2
knob 'reduce_scatter ' 4 4 --grad-accum 2 --accum-sync last
knob 'reduce all_reduce replicated' 1 0 --replicate-below 65536
knob ' master 2.4 .*initialized unsharded, then sharded;' 1 0 --meta-init 0
knob 'reduce optimizer block' 2 0 --optimizer-in-backward 1 --clip 0
knob 'reduce all_reduce all ' 2 1 --clip-norm inf
knob 'no clipping' 1 0 --clip 0
knob "gathers by NCCL's kernels" 1 0 --gather nccl
knob 'reduce all_to_all [a-z.0-9]+ bf16, 4 ranks' 4 0 --reduce copy-engine
knob 'reduce (all_to_all|all_reduce) [a-z.0-9]+ bf16, 2 ranks' 8 0 --reduce copy-engine --reduce-tail same --shard hybrid:2
knob 'beside it: 4 all_to_all,.*reductions by all-to-all and a sum in rank order' 1 0 --reduce copy-engine
knob "a step's last two read by their owners" 1 0 --reduce-tail peer
knob 'with --gather mpi is not estimated.*gathers by MPI,' 1 0 --gather mpi
knob 'the host, 1 call .*one CUDA graph' 1 0 --graph 1
knob 'epilogues are kernels of their own' 1 0 --fuse 0
knob "products by cuBLASLt's first choice" 1 0 --tune-matmul 0
knob 'reduce_scatter head' 0 1 --tie-embeddings
knob 'reduce_scatter block.0' 0 1 --freeze block.0
# What is the choice anyway shows where the choice is another: of gathers on an A100, of reductions behind the environment.
told --gpu a100 >"$dir/plain"
knob 'gathers by copy engines, into' 1 0 --gpu a100 --gather copy-engine
FSDP_REDUCE=copy-engine told >"$dir/plain"
FSDP_REDUCE=copy-engine knob "reductions by NCCL's kernels" 1 0 --reduce nccl
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
verdict "the plan's peak is the run's" "$wrong"
mpi -np 2 ./train --plan --device cpu --preset tiny --dim 100 --heads 3 --kv-heads 1
judge "a plan of what cannot be, under mpirun" "--dim 100" "--heads 3"

# What takes minutes to plan takes an hour a step, and is refused; a sequence that some train is not.
judge_plan "a step of more pieces than a plan looks at" "131072 is the most; lower one of them" --gpu h200 --attn nsa --dim 524288 --heads 4096 --kv-heads 4096 --hidden 1048576 --depth 4096 --vocab 16777216 --seq 1048576
judge_plan "a step of more pieces of logits" "--vocab 16777216" --gpu h200 --depth 1 --batch 512 --seq 2097152 --vocab 16777216
timeout $((limit / 2)) ./train --plan --gpu h200 --preset llama-47b --seq 4194304 --world 512 >"$dir/out" 2>&1
verdict "a plan of 4 M tokens, with advice, takes seconds" "$(tail -n 1 "$dir/out" | grep '^no change makes it fit' >/dev/null || echo "it has no advice in $((limit / 2)) s")"

judge_plan "a plan of copy engines between hosts" "several hosts" --world 16 --gather copy-engine
judge_plan "a plan of reductions by copy engines between hosts" "several hosts" --world 16 --reduce copy-engine
judge_plan "a plan of a graph on a CPU" "--graph 1" --device cpu --graph 1
judge_plan "a plan of copy engines on a CPU" "--gather copy-engine" --device cpu --world 2 --gather copy-engine

done_testing

#!/bin/bash
# Models in and out: the format of transformers, and the one of ours in PyTorch.
# shellcheck source=common.sh
. "${BASH_SOURCE[0]%/*}/common.sh"

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
verdict "a model goes in and out bit for bit at other numbers of ranks" "$wrong"
# The same command line goes on, and needs no folder any more.
cp -r test/hf-llama "$dir/begun"
hf=(--init "$dir/begun" --device cpu --seq 48 --global-batch 2 --data random --steps 4 --save "$dir/hf-saved")
mpi -np 2 ./train "${hf[@]}" --stop-after 2
wrong=""
grep -q "^weights of $dir/begun (llama, BF16)" "$dir/out" || wrong="it is not said where the weights are from"
# Nor does another, but for what stands beside the weights.
echo '{"model": "somebody'"'"'s"}' >"$dir/begun/tokenizer.json"
mpi -np 2 ./train --device cpu --resume "$dir/hf-saved" --stop-after 0 --export "$dir/hf-handed-on"
cmp -s "$dir/begun/tokenizer.json" "$dir/hf-handed-on/tokenizer.json" || wrong="$wrong; the tokenizer is lost"
[ "$(grep -c '"[be]os_token_id": [0-9]' "$dir/hf-handed-on/config.json")" = 2 ] || wrong="$wrong; the tokens' ids are lost"
mkdir "$dir/hf-kept" && echo mine >"$dir/hf-kept/tokenizer.json"
mpi -np 2 ./train --device cpu --init "$dir/begun" --batch 1 --seq 192 --data random --stop-after 0 --export "$dir/hf-kept"
[ "$status" = 0 ] && grep -q "kept $dir/hf-kept/tokenizer.json, which is not the model's" "$dir/out" || wrong="$wrong; another tokenizer stays without a word"
grep -q '"max_position_embeddings": 192' "$dir/hf-kept/config.json" || wrong="$wrong; positions that it is trained at are not in config.json"
rm -r "$dir/begun"
mpi -np 2 ./train "${hf[@]}" --resume latest --log "$dir/hf.jsonl" --export "$dir/hf-out"
[ "$status" = 0 ] || wrong="$wrong; exit status $status"
grep -q "without tokenizer and token ids: $dir/begun is not there any more" "$dir/out" || wrong="$wrong; it is not said that the tokenizer is lost"
grep -q "the checkpoint has the weights" "$dir/out" || wrong="$wrong; it is not said that the folder is not read"
hf[1]=test/hf-llama
mpi -np 2 ./train "${hf[@]:0:10}" --steps 4 --log "$dir/whole.jsonl"
[ "$(losses "$dir/whole.jsonl" | wc -l)" = 1 ] && [ "$(losses "$dir/whole.jsonl")" = "$(losses "$dir/hf.jsonl")" ] || wrong="$wrong; the losses are not those of the unbroken run"
grep -q '"rms_norm_eps": 0.0003' "$dir/hf-out/config.json" || wrong="$wrong; the exported model has another eps"
verdict "a run that began with a folder is resumed by the same command" "$wrong"
# A model of another tokenizer than bytes, which a vocabulary of 256 could be.
mpi -np 1 ./train --allow-single-rank --device cpu --arch llama --attn dense --dim 16 --depth 1 --heads 2 --hidden 16 --vocab 256 \
  --seq 16 --batch 1 --data random --stop-after 0 --export "$dir/words"
echo '{}' >"$dir/words/tokenizer.json"
mpi -np 2 ./train --device cpu --init "$dir/words" --batch 1 --steps 1
judge "a model of another tokenizer and the built-in corpus" "$dir/words has a tokenizer.json" "the built-in corpus" "data/prepare.py"
mpi -np 2 ./train --device cpu --init "$dir/words" --batch 1 --stop-after 0 --sample 3 --prompt Once
judge "a model of another tokenizer and a prompt of bytes" "$dir/words has a tokenizer.json" "--data random"
mpi -np 2 ./train --device cpu --init "$dir/words" --batch 1 --stop-after 0 --data random --sample 3 --prompt 1,2
verdict "a model of another tokenizer and a prompt of its tokens" "$([ "$status" = 0 ] || echo "exit status $status")"
mpi -np 2 ./train --init test/hf-llama --attn nsa --nsa-block 8 --nsa-stride 4 --nsa-select-block 8 --nsa-selected 3 --device cpu \
  --seq 48 --batch 1 --data random --steps 2
verdict "sparse attention begins with dense weights, and that is said in a line" \
  "$([ "$status" = 0 ] && grep -q "the three branches begin with its keys and values" "$dir/out" || echo "it does not")"
# Heads of another width than dim / heads: in our format, and in transformers' where values are as wide as keys.
wrong=""
i=0
for with in "--arch rope --nsa-phi mlp --head-dim 48 --v-head-dim 32" "--arch llama --attn dense --head-dim 48" "--arch llama --attn dense --head-dim 48 --v-head-dim 32"; do
  i=$((i + 1))
  # shellcheck disable=SC2206
  heads=(--device cpu --preset tiny --dim 64 --seq 64 --global-batch 6 --data random --steps 4 $with)
  mpi -np 2 ./train "${heads[@]}" --log "$dir/heads-whole.jsonl" --export "$dir/heads-$i" --export-dtype fp32
  mpi -np 2 ./train "${heads[@]}" --save "$dir/heads-saved-$i" --stop-after 2 --log "$dir/heads-parts.jsonl"
  mpi -np 3 ./train --device cpu --resume "$dir/heads-saved-$i" --log "$dir/heads-parts.jsonl" --export "$dir/heads-parts-$i" --export-dtype fp32
  [ "$status" = 0 ] || wrong="$wrong; $with: resumed, exit status $status"
  whole=$(grep -o '"loss":[0-9.]*' "$dir/heads-whole.jsonl" | tail -n 1 | cut -d: -f2)
  parts=$(grep -o '"loss":[0-9.]*' "$dir/heads-parts.jsonl" | tail -n 1 | cut -d: -f2)
  awk -v a="${whole:-nan}" -v b="${parts:-nan}" 'BEGIN { exit !(a - b < 1e-5 && b - a < 1e-5 && a > 1) }' || wrong="$wrong; $with: loss $whole in one piece, $parts resumed"
  cmp -s "$dir/heads-$i/config.json" "$dir/heads-parts-$i/config.json" || wrong="$wrong; $with: resumed as another model"
  mpi -np 3 ./train --device cpu --init "$dir/heads-$i" --seq 64 --batch 1 --data random --stop-after 0 --export "$dir/heads-again-$i" --export-dtype fp32
  diff -r "$dir/heads-$i" "$dir/heads-again-$i" >/dev/null || wrong="$wrong; $with: another model comes out than went in"
  grep -q '"head_dim": 48' "$dir/heads-again-$i/config.json" || wrong="$wrong; $with: its config.json does not say how wide heads are"
done
[ "$(cat "$dir"/heads-[123]/config.json | grep -o '"model_type": "[a-z.]*"' | cut -d'"' -f4 | xargs)" = "fsdp.cu llama fsdp.cu" ] || wrong="$wrong; the formats are not those"
verdict "models with wider heads are saved, resumed, exported and taken in again" "$wrong"
bad "a folder that is not there" "--init $dir/none|not a directory" --init "$dir/none"
bad "a preset beside a folder" "--preset tiny|test/hf-llama/config.json" --init test/hf-llama
cp -r test/hf-llama "$dir/damaged"
rm "$dir/damaged/model-00002-of-00002.safetensors"
mpi -np 2 ./train --init "$dir/damaged" --device cpu
judge "an index that names a file that is not there" "$dir/damaged/model.safetensors.index.json" "model-00002-of-00002.safetensors, which is not there"
mpi -np 2 ./train --plan --init test/hf-llama --dim 32 --device cpu
judge "a plan of a folder's model with another size" "--dim 32" "says 64"
mpi -np 2 ./train --plan --init test/hf-llama --v-head-dim 32 --device cpu
judge "a folder's model with other values than it has" "--v-head-dim 32" "says 16"
cp -r test/hf-llama "$dir/older"
sed -i '/"head_dim"/d' "$dir/older/config.json"
mpi -np 2 ./train --plan --init "$dir/older" --head-dim 24 --device cpu
judge "a folder that does not say how wide its heads are, with others" "--head-dim 24" "says 16"
# needs NAME MODULE...: python3 has them, or a test of this name is skipped.
needs() {
  local name=$1
  shift
  python3 -c "import ${*// /,}" 2>/dev/null && return
  skip "$name: python3 lacks one of: $*"
  return 1
}
if needs "PyTorch's programs without PyTorch" sys; then
  wrong=""
  for program in torch_fsdp attention hf_round_trip read_export nsa_per_token; do
    python3 -S "peers/$program.py" --help >"$dir/out" 2>&1 && wrong="$wrong; $program needs nothing" # -S: no packages
    grep -q "^error: $program.py needs .*torch.*: pip install " "$dir/out" && [ "$(wc -l <"$dir/out")" = 1 ] || wrong="$wrong; $program: $(tail -1 "$dir/out")"
  done
  verdict "PyTorch's programs without PyTorch say what they need" "$wrong"
fi
if needs "a Llama through transformers and back" torch,transformers,numpy; then
  timeout 600 python3 peers/hf_round_trip.py --work "$dir/round" --steps 5 --seq 64 --more "--device cpu" >"$dir/out" 2>&1
  status=$?
  verdict "transformers finds the loss that we printed" "$([ $status = 0 ] || echo "exit status $status")"
fi
if needs "exported models in PyTorch" torch,numpy; then
  wrong=""
  nsa="--nsa-block 8 --nsa-stride 4 --nsa-select-block 16 --nsa-selected 3 --nsa-window 12"
  i=0
  for with in "--arch rope $nsa" "--arch llama --nsa-phi mlp --nsa-gate mlp --rope-scaling llama3:8:1:4:16 $nsa" \
    "--arch simple --nsa-phi linear $nsa" "--arch rope --nsa-phi mlp --head-dim 48 --v-head-dim 32 $nsa" "--arch rope --attn dense" "--arch simple --attn dense --tie-embeddings" "--arch mlp"; do
    i=$((i + 1))
    # shellcheck disable=SC2086
    mpi -np 2 ./train --device cpu --preset tiny --dim 64 --seq 64 --batch 1 --steps 2 --lr 0.01 --data README.md --val-data README.md \
      --val-every 2 --val-batches 1 --log "$dir/val.jsonl" --export "$dir/val-$i" --export-dtype fp32 $with
    ours=$(grep -o '"val_loss":[0-9.]*' "$dir/val.jsonl" | tail -n 1 | cut -d: -f2)
    theirs=$(python3 peers/read_export.py "$dir/val-$i" README.md --sequences 2 2>"$dir/out" | awk '/^loss/ { print $2 }')
    awk -v a="${ours:-nan}" -v b="${theirs:-nan}" 'BEGIN { exit !(a - b < 1e-5 && b - a < 1e-5 && a > 1) }' || wrong="$wrong; $with: $ours here, $theirs in PyTorch"
  done
  verdict "PyTorch finds our validation loss in what is exported" "$wrong"
fi
if needs "PyTorch on our rows" torch,torchao,numpy; then
  wrong=""
  # Not scaled by row: torchao rounds those scales to powers of two.
  for more in "" "--head-dim 48 --v-head-dim 32" "--matmul-dtype fp8" "--matmul-dtype fp8 --gather-dtype fp8"; do
    row="--preset tiny --dim 64 --seq 64 --device cpu --steps 2 $more"
    # shellcheck disable=SC2086
    mpi -np 2 ./train $row --attn dense --log "$dir/row.jsonl"
    ours=$(grep -o '"loss":[0-9.]*' "$dir/row.jsonl" | head -n 1 | cut -d: -f2)
    # shellcheck disable=SC2086
    theirs=$(timeout 600 python3 -m torch.distributed.run --standalone --nproc_per_node=2 peers/torch_fsdp.py $row --compile none \
      --first 1 --last 2 2>"$dir/out" | sed -n 's/.*"losses": \[\([0-9.]*\).*/\1/p')
    awk -v a="${ours:-nan}" -v b="${theirs:-nan}" 'BEGIN { exit !(a - b < 1e-6 * b && b - a < 1e-6 * b && a > 1) }' ||
      wrong="$wrong; ${more:-as it is}: $ours here, $theirs in PyTorch"
  done
  verdict "PyTorch's first loss is ours, in fp8 and with wide keys too" "$wrong"
fi

done_testing

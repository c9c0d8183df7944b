#!/bin/bash
# Checkpoints: a run goes on from one as it was, or as it is told.
# shellcheck source=common.sh
. "${BASH_SOURCE[0]%/*}/common.sh"

run=(--device cpu --preset tiny --seq 64 --global-batch 3 --steps 6)
mpi -np 2 ./train "${run[@]}" --log "$dir/whole.jsonl"
mpi -np 2 ./train "${run[@]}" --stop-after 3 --save "$dir/saved"
mpi -np 2 ./train "${run[@]}" --save "$dir/saved" --resume latest --log "$dir/again.jsonl" --export "$dir/model.safetensors"
wrong=""
[ "$status" = 0 ] || wrong="exit status $status"
[ "$(losses "$dir/whole.jsonl" | wc -l)" = 3 ] || wrong="$wrong; the run did not log three more steps"
[ "$(losses "$dir/whole.jsonl")" = "$(losses "$dir/again.jsonl")" ] || wrong="$wrong; the losses are not those of the unbroken run"
[ -s "$dir/model.safetensors" ] || wrong="$wrong; nothing was exported"
verdict "a run goes on from a checkpoint bit for bit" "$wrong"
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
verdict "the initial weights are exported" "$wrong"

# Weights that make every loss NaN do not take the place of those before them.
broken=(--device cpu --preset tiny --seq 64 --batch 1 --steps 60 --lr 10 --warmup 0 --clip 0 --weight-decay 10)
broken+=(--on-nan skip:6 --save-every 1 --keep 1)
mpi -np 2 ./train "${broken[@]}" --save "$dir/broken"
first=$(sed -n 's/^step *\([0-9]*\): .*skipped (1 in a row.*/\1/p' "$dir/out")
saved=("$dir"/broken/step-*)
wrong=""
[ "$status" = 2 ] && [ "${first:-0}" -gt 1 ] || wrong="exit status $status, first skipped ${first:-none}"
[ "$(grep -c "is not saved: its loss or gradient norm is not finite" "$dir/out")" = 1 ] || wrong="$wrong; it is not said once that a save waits"
[ "${#saved[@]}" = 1 ] && [ "${saved[0]##*-}" -lt "${first:-0}" ] || wrong="$wrong; there is ${saved[*]##*/}"
grep -q "resume from ${saved[0]}\$" "$dir/out" || wrong="$wrong; the error leads to no step that was good"
mpi -np 2 ./train "${broken[@]}" --save "$dir/amid" --stop-after $((first + 3))
saved=("$dir"/amid/step-*)
[ "$status" = 0 ] && [ "${#saved[@]}" = 2 ] && [ -d "$dir/amid/step-$((first + 3))" ] || wrong="$wrong; a run that ends amid them leaves ${saved[*]##*/}"
verdict "a save waits while steps are skipped" "$wrong"

bad "weights from a checkpoint by the option for folders" "--init $dir/saved: a checkpoint of --save; --resume" --init "$dir/saved"
bad "and from one of its steps" "--init $dir/saved/step-3: a checkpoint of --save; --resume" --init "$dir/saved/step-3"
wrong=""
for other in "--attn dense" "--arch simple" "--depth 3"; do
  # shellcheck disable=SC2086 # an option and its value
  ./train --device cpu --plan --resume "$dir/saved" $other >"$dir/out" 2>&1 && wrong="$wrong; $other is planned"
  grep -q "^error: ${other%% *} .*: the checkpoint was made with" "$dir/out" || wrong="$wrong; $other is not what is told"
done
verdict "a plan of a run that cannot go on" "$wrong"
# The log of a run that goes on goes on, too.
cp "$dir/again.jsonl" "$dir/log.jsonl"
mpi -np 2 ./train "${run[@]}" --resume "$dir/saved/step-3" --stop-after 4 --log "$dir/log.jsonl"
wrong=""
[ "$status" = 0 ] || wrong="exit status $status"
[ "$(grep -c '"step":' "$dir/log.jsonl")" = 4 ] || wrong="$wrong; not three steps and then one more"
verdict "the log of a run that goes on" "$wrong"
# Another way to shard.
mpi -np 4 ./train "${run[@]}" --resume "$dir/saved/step-3" --shard hybrid:2 --wrap sublayer --moments bf16 --tf32 \
  --accum-sync last --log "$dir/other.jsonl"
wrong=""
[ "$status" = 0 ] || wrong="exit status $status"
[ "$(losses "$dir/other.jsonl" | wc -l)" = 3 ] || wrong="$wrong; it did not run three more steps"
verdict "a run goes on in another way to shard" "$wrong"
# What the command line leaves open comes from the checkpoint, so other ranks see the same data.
mpi -np 3 ./train --device cpu --preset tiny --seq 64 --resume "$dir/saved/step-6" --steps 8 --log "$dir/three.jsonl"
wrong=""
[ "$status" = 0 ] || wrong="exit status $status"
grep -q '"global_batch":3' "$dir/three.jsonl" || wrong="$wrong; the global batch is not the checkpoint's"
[ "$(losses "$dir/three.jsonl" | cut -d' ' -f1 | xargs)" = "7 8" ] || wrong="$wrong; it did not run steps 7 and 8"
verdict "a run goes on at another number of ranks" "$wrong"
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
verdict "a run goes on as its checkpoint says" "$wrong"
ran=$(head -n 1 "$dir/as-again.jsonl" | grep -o '"planned_peak_mib":[0-9.]*' | cut -d: -f2)
for from in "$dir/as" "latest --save $dir/as"; do
  # shellcheck disable=SC2086
  planned=$(./train --plan --device cpu --world 2 --resume $from | awk '$1 == "arena" { print $2 }')
  verdict "a plan of what goes on" "$([ -n "$ran" ] && [ "$ran" = "$planned" ] || echo "planned $planned MiB, ran $ran")"
done
./train --show-params --device cpu --world 2 --resume "$dir/none" >"$dir/out" 2>&1
status=$?
judge "a plan of what is not there" "$dir/none" "No such file"
mpi -np 2 ./train "${run[@]}" --resume "$dir/saved" --heads 4
judge "a checkpoint of other heads" "--heads 4" "made with 2"
mpi -np 2 ./train "${run[@]}" --resume "$dir/saved" --dim 64
judge "a checkpoint of another width" "--dim 64: the checkpoint was made with 128" "saved/step-"
mpi -np 2 ./train "${run[@]}" --resume "$dir/saved" --vocab 300
judge "a checkpoint of another shape" "embedding.weight" "manifest.json"
mpi -np 2 ./train --device cpu --preset tiny --seq 64 --steps 6 --resume "$dir/saved" --global-batch 4
judge "a checkpoint of another global batch" "--global-batch 3"
mpi -np 2 ./train "${run[@]}" --resume "$dir/none"
judge "no checkpoint" "$dir/none" "No such file"
# What diverges ends, and nothing of it is saved.
mpi -np 2 ./train --device cpu --preset tiny --seq 64 --steps 200 --lr 10 --clip 0 --weight-decay 10 --save "$dir/diverged" --save-every 5
judge "a run that diverges" "gradient norm" "diverged" "; resume from $(readlink -f "$dir/diverged/latest")"
mpi -np 2 ./train --device cpu --preset tiny --seq 64 --steps 200 --lr 10 --clip 0 --weight-decay 10 --save "$dir/unsaved"
judge "a run that diverges before its first save" "diverged" "there is no checkpoint to resume from"
mpi -np 2 ./train --device cpu --preset tiny --seq 64 --steps 200 --resume "$dir/diverged" --stop-after 1
verdict "a run that diverged leaves what can be loaded" "$(grep -q "resuming after step" "$dir/out" || echo "it does not go on")"

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
  ! grep -q "differs from the checkpoint" "$dir/out" || wrong="$wrong; it says that something changed"
  verdict "$1" "$wrong"
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
# What is to go on must not find its own export in its way.
to_go_on=(--device cpu --preset tiny --seq 64 --batch 1 --steps 100000 --minutes 0.005 --save "$dir/partly" --export "$dir/partly.safetensors")
good "a run that is to go on leaves out its export" "--export is left out: --minutes reached" "${to_go_on[@]}"
good "and the same command goes on" "resuming after step" "${to_go_on[@]}" --resume latest
# By whatever path: a link, a dot, from inside.
ln -s saved/step-3 "$dir/best"
wrong=""
for as in "$dir/best" "$dir/saved/step-3/." "$dir/saved/../saved/step-3/"; do
  mpi -np 2 ./train "${run[@]}" --save "$dir/saved" --resume "$as" --stop-after 3
  [ "$status" = 0 ] || wrong="$wrong; not by $as: $(grep ^error "$dir/out")"
done
verdict "a run goes on from its own step, however it is named" "$wrong"
# What would be in the way of a later save is said at the start.
touch "$dir/saved/step-6/note.txt"
mpi -np 2 ./train "${run[@]}" --save "$dir/saved" --resume "$dir/saved/step-3"
judge "a user's file in a step that is to be replaced" "--save $dir/saved" "step-6/note.txt does not belong"
rm "$dir/saved/step-6/note.txt"
mpi -np 2 ./train "${run[@]}" --save "$dir/saved/step-6/inside"
judge "a save inside a checkpoint" "--save $dir/saved/step-6/inside" "inside the checkpoint"
# What was kept is kept, and saved as often.
kept=(--device cpu --preset tiny --seq 64 --batch 1 --steps 6 --save "$dir/kept")
mpi -np 2 ./train "${kept[@]}" --stop-after 3 --save-every 1 --keep 0
mpi -np 2 ./train --device cpu --save "$dir/kept" --resume latest
verdict "a run goes on keeping and saving as it was told" \
  "$([ "$status" = 0 ] && [ -d "$dir/kept/step-1" ] && [ -d "$dir/kept/step-6" ] && [ "$(ls -d "$dir/kept"/step-* | wc -l)" -ge 4 ] || echo "there are $(ls "$dir/kept" | xargs)")"
# Two hosts with a disk each, of the same name.
mkdir -p "$dir/h1/out" "$dir/h2/out" "$dir/h1/saved" "$dir/h2/saved"
apart() { # OPTION...: a rank in each
  # shellcheck disable=SC2086 # a list of flags
  timeout -k 5 $limit mpirun $MPIRUN_FLAGS -np 1 -wdir "$dir/h1" "$PWD/train" "${small[@]}" "$@" : \
    -np 1 -wdir "$dir/h2" "$PWD/train" "${small[@]}" "$@" >"$dir/out" 2>&1 </dev/null
  status=$?
}
apart --save saved
judge "a directory of each host's own" "--save: rank 1: saved is another directory than rank 0's"
verdict "nothing is left in either" "$(find "$dir/h1" "$dir/h2" -type f)"
apart --export out/model.safetensors
judge "an export to each host's own" "--export: rank 1: out is another directory than rank 0's"
apart --export out/model
judge "a folder of each host's own" "--export: rank 1: out is another directory than rank 0's"
verdict "and nothing is left of those" "$(find "$dir/h1" "$dir/h2" -type f)"
# A directory holds one run.
mpi -np 2 ./train "${run[@]}" --save "$dir/saved"
judge "a save over another run" "--save $dir/saved" "step-6 is there" "--resume latest"

done_testing

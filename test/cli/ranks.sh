#!/bin/bash
# Ranks that are not what was meant, that disagree, or that are not there any more; and no room in memory.
# shellcheck source=common.sh
. "${BASH_SOURCE[0]%/*}/common.sh"

mpi -np 1 ./train "${small[@]}" : -np 1 ./train "${small[@]}" --lr 0.5
judge "ranks that disagree on an option" "lr"
# Rank 1 alone does not find the file that both were given; rank 0 must not wait for it.
mkdir "$dir/a" "$dir/b"
prose 2000 >"$dir/a/text.txt"
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
verdict "where the ranks are and how the model is sharded" "$wrong"

# What no other rank can know of: rank 1 throws while the others wait for it in a collective.
mpi -np 3 build/test_ranks "[.throws]"
judge "a rank that throws while others wait" "rank 1" "out of luck"

# ---------------------------------------------------------------------------------------------------------- memory
bad "no room in memory" "memory" --dim 65536 --heads 64 --kv-heads 64 --hidden 262144 --depth 1000 --vocab 256

done_testing

#!/bin/bash
# What a run writes beside checkpoints: logs, traces, diagnostics, events. And that it writes over nothing else.
# shellcheck source=common.sh
. "${BASH_SOURCE[0]%/*}/common.sh"

# Nothing that is there is written over, by whatever name it is called.
mkdir "$dir/mine"
prose 3000 >"$dir/mine/text"
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
verdict "files of the user's are as they were" "$(tar -C "$dir/mine" -df "$dir/mine.tar" 2>&1; [ ! -e "$dir/mine/new" ] || echo "new is there")"
verdict "/dev/null is a device" "$([ -c /dev/null ] || echo "it is not")"
bad "an export to nowhere" "--export|/nonexistent/model|no directory" --export /nonexistent/model
mkdir "$dir/folder.safetensors"
bad "an export onto a directory" "--export|Is a directory" --export "$dir/folder.safetensors"
bad "files of a size for one file" "--export-shard-mb" --export "$dir/model.safetensors" --export-shard-mb 7
verdict "an export that cannot be is refused before training" "$(! grep -q "^step" "$dir/out" || echo "it trains")"

good "a run" "step" "${small[@]}" --log "$dir/log.jsonl"
wrong=""
touch "$dir/log.jsonl"
[ "$(wc -l <"$dir/log.jsonl")" = 3 ] || wrong="not a header and two steps"
for key in config commit hardware memory; do head -n 1 "$dir/log.jsonl" | grep -q "\"$key\"" || wrong="$wrong; no $key in the header"; done
for key in step loss tokens_per_sec grad_norm lr timestamp step_ms peak_mib mfu; do
  tail -n 1 "$dir/log.jsonl" | grep -q "\"$key\"" || wrong="$wrong; no $key in a step"
done
cp "$dir/log.jsonl" "$dir/out"
verdict "the log of a run" "$wrong"
mpi -np 2 ./train "${small[@]}" --grad-accum 2 --log "$dir/rate.jsonl"
rows=$(sed -n 's/.*"global_batch":\([0-9]*\),.*/\1/p' "$dir/rate.jsonl" | head -n 1) tokens=$(sed -n 's/.*"seq":\([0-9]*\),.*/\1/p' "$dir/rate.jsonl" | head -n 1)
verdict "tokens a second are all ranks' of all micro-batches" "$(
  sed -n 's/.*"step_ms":\([^,]*\),.*"tokens_per_sec":\([^,}]*\).*/\1 \2/p' "$dir/rate.jsonl" |
    awk -v all=$((rows * tokens)) '{ r = $1 * $2 / 1000 / all; n += r > 0.999 && r < 1.001 } END { exit !(NR > 0 && n == NR) }' || echo "they are not")"

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
[ "$(grep -nE '^step *2/2|^the last step on the device' "$dir/out" | sed 's/.*:\(step\|the\).*/\1/' | xargs)" = "step the" ] || wrong="$wrong; the profile is not behind its step"
[ "$(grep -c '"ended":"20' "$dir/profile.jsonl")" = 1 ] || wrong="$wrong; not one step says when it ended"
verdict "the trace of a run" "$wrong"
# shellcheck disable=SC2016 # another shell's
mpi -np 1 bash -c 'ulimit -f 8 && exec "$@"' - ./train "${small[@]}" --trace "$dir/too-long.json"
judge "a trace on a full disk" "--trace" "write failed"
verdict "the run comes to its end, and leaves no half trace" "$(grep -q '^step *2/2' "$dir/out" && ! ls "$dir"/too-long.json* >/dev/null 2>&1 || echo "not so")"
mpi -np 2 ./train "${small[@]}" --save "$dir/made" --trace "$dir/made/trace.json" --export "$dir/made/model" --log "$dir/made/log"
verdict "outputs in the directory that the run makes" "$([ "$status" = 0 ] && [ -s "$dir/made/trace.json" ] && [ -e "$dir/made/model/config.json" ] && [ -s "$dir/made/log" ] || echo "exit status $status, or they are not there")"
bad "a trace to nowhere" "--trace $dir/none/trace.json|no directory $dir/none" --trace "$dir/none/trace.json"
good "a run that stops early" "stopped after step" --device cpu --preset tiny --seq 64 --batch 1 --steps 100000 --minutes 0.005 --log-every 1000 --log "$dir/early.jsonl"
last=$(sed -n 's/^stopped after step \([0-9]*\):.*/\1/p' "$dir/out")
verdict "its last step is told" "$(grep -q "^step *$last/" "$dir/out" && grep -q "\"step\":$last," "$dir/early.jsonl" || echo "step $last is not")"
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
for count in '"kernel_calls":22' '"general":0' '"sel_k_mean":32.5'; do
  [ "$(tail -n 1 "$dir/stats.jsonl" | grep -o "$count\b" | wc -l)" = 2 ] || wrong="$wrong; not $count for each block"
done
cp "$dir/stats.jsonl" "$dir/out"
verdict "the log of a run's diagnostics" "$wrong"
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
verdict "the files of --diagnostics at 1 to 4 ranks" "$wrong"
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
verdict "the files of --diagnostics of a run that is resumed" "$wrong"
bad "a directory of diagnostics that is a file" "--diagnostics $dir/stats.jsonl|not a directory" --diagnostics "$dir/stats.jsonl"
bad "diagnostics that cannot be written" "--diagnostics|/proc/none" --diagnostics /proc/none
bad "diagnostics where checkpoints are" "--diagnostics $dir/parts|where checkpoints are" --diagnostics "$dir/parts" --save "$dir/parts" --resume latest
bad "memory written nowhere" "--mem-dump-every|--diagnostics" --mem-dump-every 5

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
  skip "event files read by TensorBoard: python3 has no tensorboard (pip install tensorboard)"
fi
bad "events in a file" "--tensorboard $dir/events.py|not a directory" --tensorboard "$dir/events.py"
bad "events where checkpoints are" "--tensorboard $dir/with-events|where checkpoints are" --tensorboard "$dir/with-events" --save "$dir/with-events" --resume latest
bad "events that cannot be written" "--tensorboard|/proc/none" --tensorboard /proc/none
# shellcheck disable=SC2016 # another shell's
mpi -np 1 bash -c 'ulimit -f 8 && exec "$@"' - ./train --device cpu --preset tiny --seq 32 --steps 60 --tensorboard "$dir/full-events"
verdict "events on a full disk" "$([ "$status" = 0 ] && [ "$(tr -d '\r' <"$dir/out" | grep -c '^warning: --tensorboard: events from here on are missing: .*training continues$')" = 1 ] && \
  grep -q '^step *60/60' "$dir/out" || echo "status $status, or not one warning")"

done_testing

#!/bin/bash
# What changes, fails or is killed while a run goes on.
# shellcheck source=common.sh
. "${BASH_SOURCE[0]%/*}/common.sh"

prose 3000 >"$dir/text"
# A rank that stands still: the others say so.
# shellcheck disable=SC2086
timeout -k 5 $limit mpirun $MPIRUN_FLAGS -np 2 ./train "${small[@]:0:6}" --steps 100000 --stall 0.5 --diagnostics "$dir/stall" >"$dir/out" 2>&1 </dev/null &
for ((i = 0; i < limit * 5; i++)); do grep -qs progress "$dir/stall/heartbeat_rank1.jsonl" && break || sleep 0.1; done
pid=$(sed -n '1s/.*"pid":\([0-9]*\).*/\1/p' "$dir/stall/heartbeat_rank1.jsonl")
kill -STOP "$pid"
for ((i = 0; i < limit * 5; i++)); do grep -qs stall "$dir/stall/heartbeat_rank0.jsonl" && break || sleep 0.1; done
wrong=""
[ "$(grep -c '"msg":"stall"' "$dir/stall/heartbeat_rank0.jsonl")" = 1 ] || wrong="rank 0's heartbeat does not say so once"
kill -KILL "$pid"
wait $! 2>/dev/null
grep -q "warning: rank 0: no step has ended for [0-9.]* s: step .* is awaited" "$dir/out" || wrong="$wrong; the terminal does not say so"
verdict "a stall" "$wrong"

# Data that changes under two ranks, a log that may not grow, an output that nobody reads.
changing() { cp "$dir/text" "$dir/changing" && touch -d 2001-01-01 "$dir/changing"; }
changing
mpi_until "" "truncate -s 1000 $dir/changing" --data "$dir/changing" --save "$dir/cut"
judge "data that is cut under a run" "$dir/changing" "was cut" "had 63000 bytes and has 1000" "byte " "; restore it; there is no checkpoint"
changing
mpi_until "" "touch $dir/changing" --data "$dir/changing"
judge "data that is written to under a run" "$dir/changing" "was written to" "byte "
changing
# While the ranks stand still, and with the file's time as it was: else who reads meanwhile says that it was written to.
overwrite() {
  local ranks p
  ranks=$(pgrep -x train -a | grep -F -- "--data $dir/changing" | cut -d' ' -f1)
  for p in $ranks; do
    kill -STOP "$p"
    until grep -qs '^State:.T' "/proc/$p/status" || ! kill -0 "$p" 2>/dev/null; do sleep 0.01; done
  done
  tr a-z '\200' <"$dir/text" | dd of="$dir/changing" conv=notrunc 2>/dev/null
  touch -d 2001-01-01 "$dir/changing"
  for p in $ranks; do kill -CONT "$p"; done
}
mpi_until "" overwrite --data "$dir/changing" --vocab 128
judge "tokens beyond the vocabulary under a run" "$dir/changing" "token 128" "byte "
changing
mpi_until "changing was removed" "rm $dir/changing" --data "$dir/changing"
verdict "data that is removed under a run is read on" "$(grep -q "$dir/changing was removed" "$dir/out" && went_on "was removed" || echo "it is not, or is not said")"
if command -v prlimit >/dev/null; then
  stunt() { pgrep -x train -a | grep -F -- "--log $dir/stunted" | while read -r p _; do prlimit --pid "$p" --fsize=4000; done; }
  mpi_until "lines from here on are missing" stunt --log "$dir/stunted.jsonl"
  verdict "a log that may not grow is said once, and the run goes on" \
    "$([ "$(grep -c 'lines from here on are missing' "$dir/out")" = 1 ] && went_on "lines from here on are missing" || echo "not so")"
else
  skip "a log that may not grow: there is no prlimit"
fi
# Launched again by mistake: the second is refused, and the first loses nothing of what it has written.
twice=(--save "$dir/twice" --log "$dir/twice.jsonl" --tensorboard "$dir/twice.events" --diagnostics "$dir/twice.csv")
launch_again() {
  # shellcheck disable=SC2086 # a list of flags
  timeout -k 5 $limit mpirun $MPIRUN_FLAGS -np 2 ./train "${long[@]}" "$@" >"$dir/second" 2>&1 </dev/null
  again=$?
}
launch_twice() { launch_again "${twice[@]}"; touch "$dir/twice/.HALT"; }
mpi_until "" launch_twice "${twice[@]}"
wrong=""
[ "$again" = 2 ] || wrong="the second ended with status $again"
grep -q "^error: --save: another run is saving to $dir/twice" "$dir/second" || wrong="$wrong; it does not say why: $(tail -n 3 "$dir/second")"
awk '/^{.*"command"/ { headers++ } /"step":/ { match($0, /"step":[0-9]+/); if (substr($0, RSTART + 7, RLENGTH - 7) != ++steps) bad = 1 }
  END { exit bad || headers != 1 || steps < 2 || NR != steps + 1 }' "$dir/twice.jsonl" || wrong="$wrong; the log is not the first's"
[ "$(ls "$dir/twice.events" | wc -l)" = 1 ] || wrong="$wrong; nor are the events"
head -n 1 "$dir/twice.csv/training_fsdp.csv" | grep -q '^1,' || wrong="$wrong; nor are the diagnostics"
verdict "a launch that is refused leaves the running one's outputs alone" "$wrong"
# The same of runs that share one output alone, which the second leaves as it is, and those of its own unmade.
once=(--log "$dir/once.jsonl" --tensorboard "$dir/once" --diagnostics "$dir/once")
again_onto() { # OPTION PATH SAID
  launch_again "$1" "$2" --log "$dir/again.jsonl"
  [ "$again" = 2 ] || wrong="$wrong; the second of one $1 ended with status $again"
  grep -qF -- "error: $3" "$dir/second" || wrong="$wrong; it does not say why: $(tail -n 3 "$dir/second")"
  [ ! -e "$dir/again.jsonl" ] || wrong="$wrong; its own log is there"
}
launch_onto_each() {
  again_onto --tensorboard "$dir/once" "--tensorboard: another run is writing to $dir/once (host "
  again_onto --diagnostics "$dir/once" "--diagnostics: another run is writing to $dir/once (host "
  launch_again --log "$dir/once.jsonl" --tensorboard "$dir/again.events"
  [ "$again" = 2 ] || wrong="$wrong; the second of one log ended with status $again"
  grep -qF "error: --log $dir/once.jsonl: another run is writing to it" "$dir/second" || wrong="$wrong; it does not say why: $(tail -n 3 "$dir/second")"
  pkill -USR1 -P $run
}
wrong=""
mpi_until "" launch_onto_each "${once[@]}"
[ "$(grep -c '"command"' "$dir/once.jsonl")$(find "$dir/once" -name '*tfevents*' | wc -l)" = 11 ] || wrong="$wrong; it has begun anew"
head -n 1 "$dir/once/training_fsdp.csv" | grep -q '^1,' || wrong="$wrong; so have the diagnostics"
[ -z "$(find "$dir/once" -name '.*.lock')$(find "$dir/again.events" -name '*tfevents*')" ] || wrong="$wrong; files are left"
verdict "two runs do not write one log, one directory of events or one of diagnostics" "$wrong"
timeout -k 5 $limit ./train "${small[@]:0:6}" --steps 50 --log "$dir/unread.jsonl" --save "$dir/unread" 2>"$dir/out" | head -n 1 >/dev/null
status=${PIPESTATUS[0]} wrong=""
[ "$status" = 0 ] || wrong="it did not end well: exit status $status"
[ "$(grep -c '"step":' "$dir/unread.jsonl")" = 50 ] || wrong="$wrong; the log does not have all steps"
[ -e "$dir/unread/latest" ] || wrong="$wrong; nothing was saved"
verdict "a run whose output nobody reads goes on" "$wrong"
timeout -k 5 $limit ./train "${small[@]:0:6}" --steps 50 --sample 3 --prompt a 2>"$dir/out" | head -n 1 >/dev/null
status=${PIPESTATUS[0]}
judge "a sample that nobody reads" "standard output cannot be written: its reader has left"
timeout -k 5 $limit ./train "${small[@]:0:6}" --steps 2 2>"$dir/out" >&- <&-
status=$?
judge "a run without standard output" "standard output cannot be written: it is closed"

# Killed at any moment: whatever is there then can be resumed from.
wrong=""
resume=()
for delay in 0.1 0.4 0.8; do
  rm -f "$dir/out"
  # shellcheck disable=SC2086
  mpirun $MPIRUN_FLAGS -np 2 ./train --device cpu --preset tiny --seq 64 --global-batch 3 --steps 100000 \
    --save "$dir/killed" --save-every 1 "${resume[@]}" >"$dir/out" 2>&1 </dev/null &
  for ((i = 0; i < limit * 5; i++)); do grep -qs "^step" "$dir/out" && break || sleep 0.1; done
  sleep $delay
  # Of the last of them something is to go on from, however slow the disk; what is killed in a write ends behind it.
  [ $delay != 0.8 ] || appears "$dir/killed/latest"
  pkill -9 -f -- "--save $dir/killed" 2>/dev/null
  wait $! 2>/dev/null
  for ((i = 0; i < limit * 5; i++)); do pgrep -f -- "--save $dir/killed" >/dev/null || break; sleep 0.1; done
  [ -e "$dir/killed/latest" ] && resume=(--resume latest)
done
mpi -np 2 ./train --device cpu --preset tiny --seq 64 --global-batch 3 --steps 100000 --minutes 0.01 --save "$dir/killed" --resume latest
[ "$status" = 0 ] && grep -q "resuming after step" "$dir/out" || wrong="it does not go on: exit status $status"
verdict "a killed run goes on from what it had saved" "$wrong"
# Who asks a run to stop does not wait for the end of a validation, here of some minutes.
head -c 8000000 /dev/zero | tr '\0' a >"$dir/letters"
rm -f "$dir/out"
start=$SECONDS
# shellcheck disable=SC2086
timeout -k 5 $limit mpirun $MPIRUN_FLAGS -np 2 ./train --device cpu --preset tiny --seq 64 --global-batch 2 --steps 100000 \
  --val-every 3 --val-batches 60000 --val-data "$dir/letters" --save "$dir/validated" --trace "$dir/trace.json" >"$dir/out" 2>&1 </dev/null &
await '^step *1/'
sleep 0.3
pkill -USR1 -f -- "^\./train .*--save $dir/validated"
wait $!
status=$?
wrong=""
[ "$status" = 0 ] || wrong="exit status $status after $((SECONDS - start)) s"
grep -q "the validation of step 3 is left out: a signal" "$dir/out" || wrong="$wrong; it is not said that there is no validation"
grep -q "stopped after step [345]: .*--resume latest goes on" "$dir/out" || wrong="$wrong; it does not say how to go on"
grep -q "^--trace is left out, as the last step did not run: a signal" "$dir/out" || wrong="$wrong; nothing is said of the trace"
verdict "a validation ends where a run is asked to stop" "$wrong"
# A save that fails while training goes on: here its directory is moved away. The run ends as it would have, but says
# that its last step is not saved.
move_away() {
  appears "$dir/here/latest"
  mv "$dir/here" "$dir/there"
}
mpi_until "warning: saving step .* training goes on" move_away --save "$dir/here" --save-every 5
judge "a save that fails while training goes on" "saving step" "$dir/here" "No such file"
verdict "training goes on when a save fails" "$(goes_on "warning: saving step .* training goes on" || echo "it did not")"
# One rank alone is killed: the others do not wait for it.
run=(--device cpu --preset tiny --seq 64 --global-batch 3 --steps 100000 --save "$dir/alone" --save-every 5)
# shellcheck disable=SC2086
timeout -k 5 $limit mpirun $MPIRUN_FLAGS -np 3 ./train "${run[@]}" >"$dir/out" 2>&1 </dev/null &
appears "$dir/alone/latest"
pkill -9 -n -f -- "--save $dir/alone" 2>/dev/null
wait $! 2>/dev/null
status=$?
wrong=""
[ "$status" != 0 ] && [ "$status" != 124 ] || wrong="exit status $status"
# mpirun tells it, or a rank that saw it first and ended all.
grep -qE "signal 9|is gone, killed or crashed" "$dir/out" || wrong="$wrong; no rank was killed: $(tail -n 5 "$dir/out")"
mpi -np 2 ./train "${run[@]}" --minutes 0.01 --resume latest
[ "$status" = 0 ] && grep -q "resuming after step" "$dir/out" || wrong="$wrong; it does not go on: exit status $status"
verdict "a rank that is killed ends all" "$wrong"

done_testing

#!/bin/bash
# What a run does when a rank is killed, crashes or is stopped, when ranks wait for each other for ever, when it is asked
# to stop, and when a step is not finite. A table: the fault, what was said, how long the ranks lived on.
#   test/faults.sh          everything on the CPU backend, with GPUs there on them too
#   test/faults.sh short    one of each kind
# The last line is for test/run: RESULT passed failed skipped.
cd "$(dirname "$0")/.." || exit
export LC_ALL=C # numbers of awk, the order of sort
# shellcheck source=../setup.sh disable=SC1091
. ./setup.sh env 4
top=$PWD
dir=$(mktemp -d) || exit
trap 'rm -rf "$dir"' EXIT
passed=0
failed=0
timeout=6 # seconds, the runs' own; how long ranks may live on leaves room for a machine that does something else besides
records=. # where flight records are
KILL=9 ABRT=6 STOP=19
export OMPI_MCA_odls_base_sigkill_timeout=1
device=(--device cpu --preset tiny --seq 64 --batch 1)
where=CPU

now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN {printf "%.1f", b - a}'; }
less() { awk -v a="$1" -v b="$2" 'BEGIN {exit !(a < b)}'; }
# Of a process that is there and no zombie: R, S, D, T.
state() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -c1 | grep -v '[ZX]'; }

# begin RANKS OPTION...: starts a run of many steps in $dir/run; then $mpirun is its process.
begin() {
  ranks=$1
  shift
  rm -rf "$dir/run" && mkdir "$dir/run" && cd "$dir/run" || exit
  # shellcheck disable=SC2086 # a list of flags
  mpirun $MPIRUN_FLAGS -np "$ranks" "$top/train" "${device[@]}" --steps 100000 --timeout $timeout "$@" \
    >"$dir/run/out" 2>&1 </dev/null &
  mpirun=$!
  cd "$top" || exit
}
# The process of a rank, once it is there.
rank() {
  local p _
  for _ in $(seq 100); do
    for p in $(pgrep -P $mpirun); do
      if [ "$(tr '\0' '\n' 2>/dev/null <"/proc/$p/environ" | sed -n 's/^OMPI_COMM_WORLD_RANK=//p')" = "$1" ] &&
        [ "$(cat "/proc/$p/comm" 2>/dev/null)" = train ]; then
        echo "$p"
        return
      fi
    done
    sleep 0.05
  done
}
processes() {
  local r
  pids=''
  for r in $(seq 0 $((ranks - 1))); do pids="$pids $(rank "$r")"; done
}
steps() { # waits until so many are done
  local _
  for _ in $(seq 600); do
    [ "$(grep -ac '^step ' "$dir/run/out")" -ge "$1" ] && return
    kill -0 $mpirun 2>/dev/null || return
    sleep 0.05
  done
}
# Waits until no rank is there; $lived: seconds since $1; ends what is there after $2 seconds and says so in $orphans.
ranks_end() {
  local p left
  orphans=''
  while :; do
    left=''
    for p in $pids; do [ -z "$(state "$p")" ] || left="$left $p"; done
    [ -n "$left" ] || break
    if ! less "$(since "$1")" "$2"; then
      orphans=$left
      # shellcheck disable=SC2086
      kill -KILL $left 2>/dev/null
      break
    fi
    sleep 0.05
  done
  lived=$(since "$1")
  wait $mpirun
  status=$?
}

# row NAME WRONG: a line of the table.
row() {
  local said
  said=$(tr -d '\r' <"$dir/run/out" | grep -aE "^error: |^stopped after|: skipped| skipped \(" | head -n 1 |
    sed "s#$dir/run#DIR#g; s/^error: //" | cut -c1-150)
  if [ -z "$2" ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
  fi
  printf '%-4s %-44s %5s s  %s\n' "$where" "$1" "$lived" "$said"
  [ -z "$2" ] || {
    echo "FAILED: $1: ${2#; }"
    tail -n 15 "$dir/run/out" | sed 's/^/    /'
  }
}

# The verdict on a run that met a fault: non-zero, one line with these words, records of all ranks, nobody left.
judge_fault() { # NAME LIMIT WORD...
  local name=$1 limit=$2 wrong='' lines word r record
  shift 2
  lines=$(tr -d '\r' <"$dir/run/out" | grep -a '^error: ')
  [ "$status" != 0 ] || wrong="exit status 0"
  [ -z "$orphans" ] || wrong="$wrong; ranks lived on:$orphans"
  less "$lived" "$limit" || wrong="$wrong; it took $lived s, not under $limit"
  [ "$(printf '%s' "$lines" | grep -c '')" = 1 ] || wrong="$wrong; not one line begins with 'error: '"
  for word in "$@"; do [[ $lines == *"$word"* ]] || wrong="$wrong; the line does not have '$word'"; done
  for r in $(seq 0 $((ranks - 1))); do
    record=$dir/run/$records/flight_rank$r.jsonl
    head -n 1 "$record" 2>/dev/null | grep -q '"type":"flight_record"' || wrong="$wrong; no record of rank $r"
    [ -z "$needs_collectives" ] || grep -q '"type":"collective"' "$record" || wrong="$wrong; rank $r's record is empty"
  done
  row "$name" "$wrong"
}

# fault NAME RANKS RANK STEP SIGNAL TEXT OPTION...: the rank sends itself the signal in that collective.
fault() {
  local name=$1 n=$2 victim=$3 step=$4 signal=$5 text=$6 limit words=() p t
  shift 6
  export FSDP_TEST_FAULT="$victim,$step,$signal,$text"
  begin "$n" "$@"
  unset FSDP_TEST_FAULT
  p=$(rank "$victim")
  processes
  for _ in $(seq 1200); do
    case $(state "$p") in '' | T) break ;; esac
    sleep 0.05
  done
  t=$(now)
  if [ "$signal" = $STOP ]; then
    limit=$((timeout + 4))
    words=("rank $victim " "pid $p" "has not answered")
  else
    limit=10
    words=("rank $victim " "pid $p" "is gone")
  fi
  needs_collectives=$step
  [ "$step" != 0 ] || needs_collectives=''
  ranks_end "$t" 30
  if [ "$step" != 0 ]; then
    # On a GPU the host is ahead: when it meets the fault, the other rank's GPU may still be in the step before.
    [ "$where" = CPU ] || ! grep -aq "waits in step $((step - 1))," "$dir/run/out" || step=$((step - 1))
    words+=("step $step")
  fi
  judge_fault "$name, rank $victim of $n" $limit "${words[@]}" ${expect:+"$expect"}
}

# asked NAME RANKS HOW OPTION...: HOW is a signal and a rank, "TERM 1"; a signal and "mpirun"; or "file". The run ends with
# status 0 (mpirun gives its own when it is the one that is signalled), its last step is saved, and goes on from there.
asked() {
  local name=$1 n=$2 how=$3 t wrong='' last
  shift 3
  begin "$n" --save save "$@"
  processes
  steps 5
  t=$(now)
  case $how in
    file) : >"$dir/run/save/.HALT" ;;
    *mpirun) kill -"${how% *}" $mpirun ;;
    *) kill -"${how% *}" "$(rank "${how#* }")" ;;
  esac
  ranks_end "$t" 20
  last=$(tr -d '\r' <"$dir/run/out" | sed -n 's/^stopped after step \([0-9]*\): .*--resume latest.*/\1/p')
  [[ $how == *mpirun ]] || [ "$status" = 0 ] || wrong="exit status $status"
  [ -n "$last" ] || wrong="$wrong; it does not say how to go on"
  [ "$(readlink "$dir/run/save/latest")" = "step-$last" ] || wrong="$wrong; step $last is not saved"
  [ ! -e "$dir/run/save/.HALT" ] || wrong="$wrong; .HALT is still there"
  ! ls "$dir"/run/flight_* "$dir"/run/save/flight_* >/dev/null 2>&1 || wrong="$wrong; there are flight records"
  if [ -z "$wrong" ]; then
    # shellcheck disable=SC2086
    (cd "$dir/run" && timeout 60 mpirun $MPIRUN_FLAGS -np "$n" "$top/train" "${device[@]}" --steps 100000 --save save \
      --resume latest --stop-after $((last + 1)) >again 2>&1 </dev/null) || wrong="it does not go on"
    grep -aq "resuming after step $last" "$dir/run/again" || wrong="$wrong; it goes on from elsewhere"
  fi
  row "$name, $n ranks" "$wrong"
}

second_signal() {
  local t wrong='' p
  begin 2 --save save
  processes
  steps 5
  p=$(rank 1)
  kill -STOP "$(rank 0)" # so that the step cannot end
  t=$(now)
  kill -TERM "$p"
  sleep 1.2
  kill -TERM "$p"
  ranks_end "$t" 20
  [ "$status" != 0 ] || wrong="exit status 0"
  [ -z "$orphans" ] || wrong="$wrong; ranks lived on:$orphans"
  grep -aq '^error: .*second signal' "$dir/run/out" || wrong="$wrong; it does not say so"
  row "a second signal while nothing ends" "$wrong"
}

# alone CASE NAME RANKS LIMIT WORD...: a case of build/test_ranks that ends its program within that time.
alone() {
  local t case=$1 name=$2 limit=$4
  ranks=$3
  shift 4
  rm -rf "$dir/run" && mkdir "$dir/run" && cd "$dir/run" || exit
  t=$(now)
  # shellcheck disable=SC2086
  timeout 60 mpirun $MPIRUN_FLAGS -np "$ranks" "$top/build/test_ranks" "[.$case]" >"$dir/run/out" 2>&1 </dev/null
  status=$?
  cd "$top" || exit
  lived=$(since "$t")
  orphans=''
  needs_collectives=1
  judge_fault "$name, $ranks ranks" "$limit" "$@"
}
# A library that stands before MPI's own: on rank 1 the call that UNLUCKY names fails, or never returns.
unlucky_library() {
  cat >"$dir/unlucky.cc" <<'END'
#include <cstdlib>
#include <cstring>
#include <mpi.h>
#include <unistd.h>
static bool unlucky(const char* call) {
  const char *rank = getenv("OMPI_COMM_WORLD_RANK"), *named = getenv("UNLUCKY");
  return rank && named && strcmp(rank, "1") == 0 && strcmp(named, call) == 0;
}
extern "C" int MPI_Bcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm comm) {
  return unlucky("MPI_Bcast") ? MPI_ERR_OTHER : PMPI_Bcast(data, count, type, root, comm);
}
extern "C" int MPI_Init_thread(int* argc, char*** argv, int wanted, int* provided) {
  while (unlucky("MPI_Init_thread")) pause();
  return PMPI_Init_thread(argc, argv, wanted, provided);
}
extern "C" int MPI_Finalize() {
  while (unlucky("MPI_Finalize")) pause();
  return PMPI_Finalize();
}
END
  "${MPICXX:-mpicxx}" -shared -fPIC -o "$dir/unlucky.so" "$dir/unlucky.cc" >"$dir/build" 2>&1 && return
  failed=$((failed + 1))
  echo "FAILED: a library before MPI's: $(head -n 3 "$dir/build")"
  return 1
}
unlucky() { # CALL OPTION...: runs two ranks until they end
  local t call=$1
  shift
  t=$(now)
  LD_PRELOAD=$dir/unlucky.so ASAN_OPTIONS=${ASAN_OPTIONS-}:verify_asan_link_order=0 UNLUCKY=$call begin 2 "$@"
  processes
  needs_collectives=''
  ranks_end "$t" 30
}
unlucky_calls() {
  unlucky_library || return
  unlucky MPI_Bcast
  judge_fault "an MPI call of the start that fails, rank 1 of 2" $((timeout + 4)) "MPI_Bcast" "on rank 1"
  unlucky MPI_Init_thread
  judge_deadline "MPI does not start" 1 "error: MPI did not start within $timeout s"
  unlucky MPI_Finalize --stop-after 3
  judge_deadline "MPI does not end" 1 "error: this run has done all it was asked for, but MPI did not end within $timeout s"
  unlucky MPI_Finalize --stop-after 3 --val-data "$dir/none" --val-every 1
  judge_deadline "nor after an error" 2 "warning: MPI did not end within $timeout s after this error"
}
# Of a run in which MPI stands still: one line says so, and its status is this.
judge_deadline() { # NAME STATUS TEXT
  local wrong=''
  [ "$status" = "$2" ] || wrong="exit status $status"
  [ -z "$orphans" ] || wrong="$wrong; ranks lived on:$orphans"
  less "$lived" $((timeout + 6)) || wrong="$wrong; it took $lived s"
  [ "$(tr -d '\r' <"$dir/run/out" | grep -acF "$3")" = 1 ] || wrong="$wrong; not one line says '$3'"
  [ "$(tr -d '\r' <"$dir/run/out" | grep -ac '^error: ')" = 1 ] || wrong="$wrong; not one line begins with 'error: '"
  row "$1" "$wrong"
}
deadlock() { # RANKS
  alone deadlock "a collective that one never comes to" "$1" 20 "all ranks wait" "barrier" "agreement"
}
asynchronous() { # RANKS
  alone asynchronous "NCCL's asynchronous error" "$1" 15 "rank $(($1 - 1)) (" \
    "NCCL: asynchronous error on the gather channel: unhandled system error: out of luck" "step 1"
}

not_finite() { # NAME OPTIONS: what is said has the words
  local name=$1 t wrong=''
  shift
  begin 2 --lr 10 --clip 0 --weight-decay 10 --warmup 0 "$@"
  processes
  t=$(now)
  ranks_end "$t" 60
  [ "$status" = 2 ] || wrong="exit status $status"
  grep -aqE "^error: step [0-9]+: the loss is .*sequences [0-9]+ to [0-9]+" "$dir/run/out" || wrong="$wrong; no such line"
  [ -z "$expect" ] || grep -aq -- "$expect" "$dir/run/out" || wrong="$wrong; it does not say '$expect'"
  ! ls "$dir"/run/flight_* >/dev/null 2>&1 || wrong="$wrong; there are flight records"
  row "$name" "$wrong"
}

short() {
  expect="all_gather of 'block.1'" fault "killed in a gather" 2 1 5 $KILL "gather all_gather of 'block.1'"
  expect="reduce_scatter of 'block.0'" fault "stopped in a reduction" 3 0 5 $STOP "reduce reduce_scatter of 'block.0'"
  expect='' asked "SIGTERM" 2 "TERM 1"
  expect='' asked ".HALT" 3 file
  expect='' deadlock 2
  asynchronous 3
  unlucky_calls
  expect="did not apply it" not_finite "a step that is not finite"
}

full() {
  local n signal name
  for n in 2 3 4; do
    for signal in $KILL $ABRT $STOP; do
      case $signal in
        "$KILL") name=killed ;;
        "$ABRT") name=aborted ;;
        *) name=stopped ;;
      esac
      expect="all_gather of 'block.1'" fault "$name in a gather" $n $((n - 1)) 5 "$signal" "gather all_gather of 'block.1'"
      expect="reduce_scatter of 'block.0'" fault "$name in a reduction" $n 0 5 "$signal" "reduce reduce_scatter of 'block.0'"
      expect="of 'norm and loss'" fault "$name at the optimizer" $n $((n - 1)) 5 "$signal" "all_reduce of 'norm and loss'"
      records=save expect='' fault "$name in a save" $n $((n - 1)) 6 "$signal" "texts gather" --save save --save-every 6
      expect='' fault "$name in the start" $n 0 0 "$signal" "host comparison"
    done
  done
  for n in 2 3 4; do expect='' deadlock $n; done
  for n in 2 4; do
    expect='' asked "SIGTERM at the last rank" $n "TERM $((n - 1))"
    expect='' asked "SIGINT at rank 0" $n "INT 0"
    expect='' asked "SIGTERM at mpirun" $n "TERM mpirun"
    expect='' asked "SIGUSR1 at mpirun" $n "USR1 mpirun"
    expect='' asked ".HALT" $n file
  done
  expect='' asked "SIGHUP at rank 1" 2 "HUP 1"
  second_signal
  unlucky_calls
  for n in 2 4; do asynchronous $n; done
  alone starved "the same, its watchdogs seldom at the processor" 2 30 "all ranks wait"
  expect="did not apply it" not_finite "a step that is not finite, --on-nan stop"
  expect="skips at most 3 in a row" not_finite "the same, --on-nan skip:3" --on-nan skip:3
}

gpus() {
  local graph how what kind gather
  device=(--device gpu --preset tiny --seq 1024 --batch 1)
  where=GPU
  timeout=10
  for graph in 0 1; do
    for how in nccl copy-engine; do
      [ $how = nccl ] && gather=all_gather || gather=barrier
      for kind in $KILL $STOP; do
        expect='' fault "signal $kind in a gather, $how, --graph $graph" 2 1 8 "$kind" "gather $gather of 'block.1'" \
          --gather $how --graph $graph
      done
    done
    for what in 'nccl reduce reduce_scatter' 'copy-engine reduce all_to_all'; do
      for kind in $KILL $STOP; do
        expect='' fault "signal $kind in a reduction, ${what%% *}, --graph $graph" 2 0 8 "$kind" "${what#* } of 'block.1'" \
          --reduce "${what%% *}" --graph $graph
      done
    done
    expect='' asked "SIGTERM, --graph $graph" 2 "TERM 1" --graph $graph
  done
  expect="did not apply it" not_finite "a step that is not finite"
}

case ${1-} in
  '')
    full
    if [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')" -ge 2 ]; then gpus; fi
    ;;
  short) short ;;
  gpu) gpus ;;
  *)
    echo "usage: test/faults.sh [short|gpu]" >&2
    exit 2
    ;;
esac
echo "RESULT $passed $failed 0"
[ "$failed" = 0 ]

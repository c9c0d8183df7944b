# What the suites beside this file share; each begins by sourcing it and ends by `done_testing`. They run ./train and
# ./bench as users do: under mpirun with two ranks each mistake must give exactly one line of ours (`error: ...`) that
# names the culprit, and end all ranks with a non-zero status soon.
# shellcheck shell=bash
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
export LC_ALL=C # numbers of awk, the order of sort
# shellcheck source=../../setup.sh disable=SC1091
. ./setup.sh env 2
# shellcheck source=../verdict.sh
. test/verdict.sh
unset "${!FSDP_@}" # options of whoever runs the tests
# When a rank has ended badly mpirun ends the others at once, and not a second later: what is to be said is said by then.
export OMPI_MCA_odls_base_sigkill_timeout=0
dir=$(mktemp -d) || exit # without one the files below would lie in /
trap 'rm -rf "$dir"' EXIT
limit=$([ "${SAN-}" = 1 ] && echo 200 || echo 60) # seconds of a run, most of which take one: other suites run beside
small=(--device cpu --preset tiny --seq 64 --batch 1 --steps 2)

mpi() { # the rest of an mpirun command line; output in $dir/out, status in $status, seconds in $took
  local start=$SECONDS
  # shellcheck disable=SC2086 # a list of flags
  timeout -k 5 $limit mpirun $MPIRUN_FLAGS "$@" >"$dir/out" 2>&1 </dev/null
  status=$?
  took=$((SECONDS - start))
}

judge() { # NAME WORD...: the output must be one error line that holds every word
  local name=$1 wrong="" lines word
  shift
  lines=$(tr -d '\r' <"$dir/out" | grep -a '^error: ')
  if [ "$status" = 0 ]; then wrong="exit status 0"; fi
  if [ "$status" = 124 ] || [ "$status" = 137 ]; then wrong="still running after $took s"; fi
  if [ "$(printf '%s' "$lines" | grep -c '')" != 1 ]; then
    wrong="$wrong; $(printf '%s' "$lines" | grep -c '') lines begin with 'error: ', not one"
  fi
  for word in "$@"; do
    [[ $lines == *"$word"* ]] || wrong="$wrong; the error does not name '$word'"
  done
  if grep -aqE 'terminate called|Segmentation fault|core dumped|internal error' "$dir/out"; then wrong="$wrong; it crashed"; fi
  verdict "$name" "$wrong"
}

# bad NAME 'WORD|WORD...' OPTION...: two ranks, the small run with these options besides.
bad() {
  local name=$1 words
  IFS='|' read -r -a words <<<"$2"
  shift 2
  mpi -np 2 ./train "${small[@]}" "$@"
  judge "$name" "${words[@]}"
}

# good NAME WORD OPTION...: one process without mpirun; exit status 0 and the word in what it prints.
good() {
  local name=$1 word=$2 wrong=""
  shift 2
  timeout -k 5 $limit ./train "$@" >"$dir/out" 2>&1 </dev/null
  status=$?
  [ "$status" = 0 ] || wrong="exit status $status"
  grep -aqF -- "$word" "$dir/out" || wrong="$wrong; '$word' is not in the output"
  verdict "$name" "$wrong"
}

# u16 N...: numbers as two bytes each, little end first.
# shellcheck disable=SC2059 # the format is the data
u16() { for n in "$@"; do printf "\\x$(printf %02x $((n & 255)))\\x$(printf %02x $((n >> 8)))"; done; }
# tokens MAGIC COUNT: 200 tokens of two bytes behind a header that says COUNT.
tokens() {
  printf '%s' "$1"
  u16 2 0 0 0 "$2" 0 0 0
  # shellcheck disable=SC2046
  u16 $(seq 0 199)
}

# prose LINES: text of 21 bytes a line.
prose() { yes "all work and no play" | head -n "$1"; }

judge_plan() { # NAME WORD OPTION...: refused before the run as in it
  local name=$1 word=$2
  shift 2
  ./train --plan "$@" >"$dir/out" 2>&1
  status=$?
  judge "$name" "$word"
}

# await ERE: waits until a line of the output matches, or half of the limit is over.
await() {
  local i
  for ((i = 0; i < limit * 10; i++)); do grep -qsE -- "$1" "$dir/out" && return || sleep 0.05; done
}
# appears PATH: waits until it is there, or half of the limit is over.
appears() {
  local i
  for ((i = 0; i < limit * 5; i++)); do [ -e "$1" ] && return || sleep 0.1; done
}
# goes_on ERE: whether a step follows the first line that matches.
goes_on() { sed -nE "/$1/,\$p" "$dir/out" | grep -q '^step '; }
went_on() { goes_on "$1" && grep -q '^stopped after step ' "$dir/out"; } # until it was asked to stop
# mpi_until ERE COMMAND OPTION...: like mpi -np 2 ./train of a run without an end. The command is run when two steps are
# there. Then it ends by itself, or, with an ERE, is asked to when a line of the output matches and a step is behind that.
long=(--device cpu --preset tiny --seq 64 --batch 1 --steps 1000000 --minutes 1)
mpi_until() {
  local until=$1 command=$2 start=$SECONDS run i
  shift 2
  rm -f "$dir/out"
  # shellcheck disable=SC2086 # a list of flags
  timeout -k 5 $limit mpirun $MPIRUN_FLAGS -np 2 ./train "${long[@]}" "$@" >"$dir/out" 2>&1 </dev/null &
  run=$!
  await '^step *2/'
  $command
  if [ -n "$until" ]; then
    await "$until"
    for ((i = 0; i < limit * 10; i++)); do goes_on "$until" && break || sleep 0.05; done
    pkill -USR1 -P $run
  fi
  wait $run
  took=$((SECONDS - start)) status=0
  ! grep -q '^error: ' "$dir/out" || status=1
}

# losses LOG: step and loss of each step after the third, from a log.
losses() { grep '"step"' "$1" 2>/dev/null | sed 's/.*"loss":\([^,]*\),.*"step":\([0-9]*\).*/\2 \1/' | awk '$1 > 3'; }

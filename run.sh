#!/bin/bash
# Trains under mpirun, and goes on from the latest checkpoint when a rank, a GPU or a host is lost: with the ranks that
# are left, for a checkpoint suits any number of them, and keeps the global batch.
#
#   ./run.sh [-n RANKS] [--restart N] [--hostfile FILE] ./train --save DIR --save-every 100 ...
#
#   -n RANKS         at most so many; default: as many as GPUs are seen, 4 without; with --hostfile: all slots
#   --restart N      start again so often (default 3); a checkpoint that is newer than at the last start counts anew
#   --hostfile FILE  mpirun's ("host slots=8"); before each start the hosts that ssh does not reach are left out
#
# Exit status: 0 as ./train's, 2 for what starting again cannot mend (an option, a path), else the last fault's.
# SIGTERM, SIGINT and SIGHUP go to the ranks, which save and end; nothing is started again then.
set -uo pipefail
home=$(cd "$(dirname "$0")" && pwd) || exit 1
# shellcheck source=probe.sh disable=SC1091
. "$home/probe.sh"

fail() {
  echo "error: run.sh: $*" >&2
  exit 2
}
say() { echo "run.sh: $*" >&2; }
number() { [[ $2 =~ ^[0-9]+$ ]] || fail "$1 $2: give a number"; }

most=
restarts=3
hostfile=
while [ $# -gt 0 ]; do
  case $1 in
    -n | -np | --restart | --hostfile)
      [ $# -gt 1 ] || fail "$1 needs a value"
      case $1 in
        --restart) number "$1" "$2" && restarts=$2 ;;
        --hostfile) [ -r "$2" ] || fail "--hostfile $2: cannot be read" && hostfile=$2 ;;
        *) number "$1" "$2" && most=$2 ;;
      esac
      shift 2
      ;;
    -h | --help)
      sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    -*) fail "$1: no such option; see ./run.sh --help" ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || fail "no command; ./run.sh [-n RANKS] [--restart N] ./train --save DIR ..."
[ -z "$most" ] || [ "$((10#$most))" -gt 0 ] || fail "-n $most: give a number of ranks, 1 or more"

command -v "$1" >/dev/null || fail "$1: no such program"

# The command without --resume, whose place is taken by the checkpoint of this run as soon as there is one.
command=("$1")
shift
first_resume=()
config=${FSDP_CONFIG-}
save=
device=
while [ $# -gt 0 ]; do
  case $1 in
    --resume=*) first_resume=("$1") ;;
    --resume)
      first_resume=("$@")
      first_resume=("${first_resume[@]:0:2}")
      [ $# -lt 2 ] || shift
      ;;
    *)
      command+=("$1")
      case $1 in
        --config=*) config=${1#--config=} ;;
        --config) config=${2-} ;;
        --save=*) save=${1#--save=} ;;
        --save) save=${2-} ;;
        --device=*) device=${1#--device=} ;;
        --device) device=${2-} ;;
      esac
      ;;
  esac
  shift
done

# setting NAME: what the file of options says, as ./train reads it: quotes keep what they hold, # begins a comment.
setting() {
  [ ! -f "$config" ] ||
    sed -nE "1s/^\xef\xbb\xbf//; s/^[[:space:]]*$1[[:space:]]*=[[:space:]]*//p" "$config" | tail -n 1 |
    sed -E "s/^([\"'])(.*)\1[[:space:]]*(#.*)?\$/\2/; t; s/(^|[[:space:]]+)#.*//; s/[[:space:]]+\$//"
}
save=${save:-${FSDP_SAVE:-$(setting save)}}
device=${device:-${FSDP_DEVICE:-$(setting device)}}
[ -n "$save" ] || fail "give --save DIR: without a checkpoint there is nothing to go on from"

latest() { readlink "$save/latest"; }

# How many ranks can run now, and the hosts for them. Sets `ranks` and `hosts`, the options for mpirun.
choose_ranks() {
  hosts=()
  if [ -n "$hostfile" ]; then
    local line host slots answering=
    ranks=0
    while read -r line || [ -n "$line" ]; do
      line=${line%%#*}
      host=${line%%[[:space:]]*}
      [ -n "$host" ] || continue
      slots=1
      [[ $line =~ [[:space:]]slots[[:space:]]*=[[:space:]]*([0-9]+) ]] && slots=${BASH_REMATCH[1]}
      if [ "$host" = localhost ] || ssh -o BatchMode=yes -o ConnectTimeout=5 "$host" true </dev/null; then
        answering+="${answering:+,}$host:$slots"
        ranks=$((ranks + slots))
      else
        say "host $host does not answer: left out"
      fi
    done <"$hostfile"
    hosts=(--host "$answering")
  else
    ranks=0
    if [ "$device" != cpu ] && ! "${command[0]}" --version | grep -q 'CUDA none'; then
      ranks=$(probe_gpus && echo "${fact[gpus]}")
    fi
    [ "$ranks" != 0 ] || ranks=${most:-4} # on a CPU there is room for any number
  fi
  [ -z "$most" ] || [ "$ranks" -le "$most" ] || ranks=$most
}

# mpirun kills its ranks two seconds after a SIGTERM, and waits as long for ranks that are dead already. So it gets
# SIGUSR1, which it passes on: they finish the step, save and end. A second signal, a second or more later, ends them at
# once; but not SIGHUP, of which a terminal that is closed sends several.
pid=
ended= # when it was asked for, in microseconds
pass_on() { # SIGNAL
  local now=${EPOCHREALTIME//[.,]/}
  if [ -z "$ended" ]; then
    ended=$now
    [ -z "$pid" ] || kill -s USR1 "$pid" 2>/dev/null
  elif [ "$1" != HUP ] && [ $((now - ended)) -ge 1000000 ]; then
    [ -z "$pid" ] || kill -s TERM "$pid" 2>/dev/null
  fi
}
trap 'pass_on TERM' TERM INT
trap 'pass_on HUP' HUP

for ((left = restarts, pause = 0; ; left--)); do
  choose_ranks
  [ "$ranks" -gt 0 ] || fail "no host of $hostfile answers"
  # shellcheck source=setup.sh disable=SC1091
  . "$home/setup.sh" env "$ranks" || exit 2
  resume=("${first_resume[@]}")
  begun=$(latest) && resume=(--resume "$save")
  started=$SECONDS
  # shellcheck disable=SC2086 # a list of flags
  setsid mpirun ${MPIRUN_FLAGS-} "${hosts[@]}" -np "$ranks" "${command[@]}" "${resume[@]}" &  # out of Ctrl-C's reach
  pid=$!
  while
    wait "$pid"
    status=$?
    kill -0 "$pid" 2>/dev/null
  do :; done
  pid=
  [ "$status" != 0 ] && [ "$status" != 2 ] && [ -z "$ended" ] || exit "$status"
  now=$(latest)
  [ "$now" = "$begun" ] || left=$restarts pause=0
  if [ "$left" -le 0 ]; then
    say "ended with status $status after $((SECONDS - started)) s, and again without a new checkpoint: not started again"
    exit "$status"
  fi
  say "ended with status $status after $((SECONDS - started)) s; going on from ${now:-the beginning} ($left of $restarts)"
  sleep "$pause" &
  wait $!
  [ -z "$ended" ] || exit "$status"
  pause=$((pause == 0 ? 1 : pause < 60 ? pause * 2 : 60))
done

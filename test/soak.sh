#!/bin/bash
# make soak MINUTES=n: trains, kills a rank at a time that nobody knows, goes on from the latest checkpoint, again and
# again. Runs of two kinds, in turn: one keeps its number of ranks, and every loss and norm must be an undisturbed run's
# to the last bit; one goes on with another number each time, and they may differ by rounding. Of each: no step is
# missing from the log, and the directory has the checkpoints that it should have and nothing else.
# A line a run goes to results/soak-Ngpu.jsonl; the exit status is 0 if all held. SEED=n repeats the choices.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
export LC_ALL=C # numbers of awk, the order of sort
minutes=${1-30}
[[ $minutes =~ ^[1-9][0-9]*$ ]] || { echo "error: MINUTES=$minutes: give minutes, a whole number from 1" >&2 && exit 2; }
gpus=$(. ./probe.sh && probe_gpus && echo "${fact[gpus]:-0}")
./train --version | grep -q 'CUDA none' && gpus=0
if [ "$gpus" = 0 ]; then
  most=4 steps=400 every=10 device=(--device cpu --preset tiny --seq 64)
else
  # Of 1024 tokens every block is selected: where a choice is to be made, rounding tips it sooner or later, and from
  # there on two runs differ by more than rounding.
  most=$gpus steps=600 every=20 device=(--preset tiny --seq 1024)
fi
fixed=$((most < 2 ? most : 2))
# shellcheck source=../setup.sh disable=SC1091
. ./setup.sh env "$most"
export FSDP_ALLOW_SINGLE_RANK=1 # a number of ranks that was drawn is meant
RANDOM=${SEED:=$((RANDOM))}
dir=$(mktemp -d) || exit
trap '[ -z "${launcher-}" ] || kill -TERM "$launcher" 2>/dev/null; rm -rf "$dir"' EXIT
trap 'exit 143' TERM INT
results=results/soak-${gpus}gpu.jsonl
keep=3

# train NAME RANKS [OPTION...]: in the background; sets `launcher`.
train() {
  local name=$1 ranks=$2
  shift 2
  # shellcheck disable=SC2086 # a list of flags
  setsid mpirun $MPIRUN_FLAGS -np "$ranks" ./train "${device[@]}" --global-batch $((most * 2)) --param-dtype fp32 \
    --steps "$steps" --save "$dir/$name" --save-every $every --keep $keep --log "$dir/$name.jsonl" "$@" \
    >>"$dir/$name.out" 2>&1 </dev/null &
  launcher=$!
}

ranks_of() { pgrep -x train -a | grep -F -- "--save $dir/$1 " | cut -d' ' -f1; }

# The largest relative difference of the losses and norms of two logs, where a repeated step's last line counts; then
# how many steps are missing from the second, and how many lines it has twice.
compare() {
  awk -v steps="$steps" '
    function field(name) { return match($0, "\"" name "\":[-0-9.e+]+") ? substr($0, RSTART + length(name) + 3, RLENGTH - length(name) - 3) : "" }
    function differ(a, b) { d = a - b; if (d < 0) d = -d; if (a < 0) a = -a; return a ? d / a : d }
    field("step") == "" { next }
    FNR == NR { loss[field("step")] = field("loss"); norm[field("step")] = field("grad_norm"); next }
    { s = field("step"); again += s in other; other[s] = field("loss"); other_norm[s] = field("grad_norm") }
    END {
      for (s = 1; s <= steps; s++) {
        if (!(s in other)) { missing++; continue }
        d = differ(loss[s], other[s]); if (d > most) most = d
        d = differ(norm[s], other_norm[s]); if (d > most) most = d
      }
      printf "%.3g %d %d\n", most, missing, again
    }' "$1" "$2"
}

# What is wrong with the directory of a run that has ended. Of each kill a flight record stays.
check_files() {
  local expected name
  expected=$(for ((i = 0; i < keep; i++)); do echo "step-$((steps - every * i))"; done; echo latest)
  for name in "$dir/$1"/* "$dir/$1"/.[!.]*; do
    name=${name##*/}
    [[ $name == '.[!.]*' || $name == flight_rank*.jsonl ]] || grep -qx -- "$name" <<<"$expected" || echo -n "$name is left over; "
  done
  for name in $expected; do [ -e "$dir/$1/$name" ] || echo -n "$name is missing; "; done
}

echo "soak: $minutes minutes, $gpus GPUs, SEED=$SEED"
train reference "$fixed"
wait "$launcher" || { grep '^error' "$dir/reference.out" && exit 1; }
[ -z "$(check_files reference)" ] || { check_files reference && exit 1; }

bad=0
for ((leg = 1; SECONDS < minutes * 60; leg++)); do
  name=run-$leg kills=0 sizes='' begun=$SECONDS
  while :; do
    ranks=$((leg % 2 ? fixed : RANDOM % most + 1))
    sizes+="${sizes:+,}$ranks"
    resume=()
    [ ! -e "$dir/$name/latest" ] || resume=(--resume "$dir/$name")
    train "$name" "$ranks" "${resume[@]}"
    sleep "$((RANDOM % 8)).$((RANDOM % 10))"
    victim=$(ranks_of "$name" | sort -R --random-source=<(yes "$RANDOM") | head -n 1)
    if [ -n "$victim" ] && kill -9 "$victim" 2>/dev/null; then kills=$((kills + 1)); fi
    wait "$launcher" && break
    if [ -n "$(ranks_of "$name")" ]; then
      wrong="ranks outlive mpirun: $(ranks_of "$name" | paste -sd' ')"
      echo "FAILED: $name: $wrong" && bad=$((bad + 1))
    fi
    # A fault in the first second of a run leaves nothing to go on from; it begins again then.
  done
  read -r difference missing again < <(compare "$dir/reference.jsonl" "$dir/$name.jsonl")
  wrong=$(check_files "$name")
  [ "$missing" = 0 ] || wrong+="$missing steps are missing from the log; "
  limit=$([ $((leg % 2)) = 1 ] && echo 0 || echo 1e-4)
  awk -v a="$difference" -v b="$limit" 'BEGIN { exit !(a <= b) }' || wrong+="losses differ by $difference; "
  printf '{"run":%d,"ranks":[%s],"kills":%d,"steps":%d,"steps_repeated":%d,"largest_difference":%s,"wrong":"%s","seconds":%d,"gpus":%d,"seed":%d,"commit":"%s","date":"%s"}\n' \
    "$leg" "$sizes" "$kills" "$steps" "$again" "$difference" "$wrong" $((SECONDS - begun)) "$gpus" "$SEED" \
    "$(./train --version | sed -n 's/^fsdp.cu \([^,]*\).*/\1/p')" "$(date -u +%FT%TZ)" | tee -a "$dir/results"
  [ -z "$wrong" ] || bad=$((bad + 1))
  rm -rf "${dir:?}/$name" "$dir/$name.jsonl" "$dir/$name.out"
done
mkdir -p results && cp "$dir/results" "$results"
echo "soak: $((leg - 1)) runs, $bad wrong; $results"
[ "$bad" = 0 ]

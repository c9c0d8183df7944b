#!/bin/bash
# What run.sh does when a run ends. The last line is for test/run: RESULT passed failed skipped.
cd "$(dirname "$0")/.." || exit
export LC_ALL=C # numbers of awk, the order of sort
dir=$(mktemp -d) || exit
trap 'rm -rf "$dir"' EXIT
passed=0
failed=0
train=(./train --device cpu --preset tiny --seq 64 --global-batch 4 --steps 300 --save "$dir/save" --save-every 10)

check() { # NAME, then what must hold, as a command
  local name=$1
  shift
  if "$@"; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "FAILED: $name"
    tail -n 20 "$dir/out" | sed 's/^/    /'
  fi
}
says() { grep -aqF -- "$1" "$dir/out"; }
ranks_running() { pgrep -x train -a | grep -F -- "--save $dir/save " | cut -d' ' -f1; }
begin() { # run.sh with these arguments; in the background
  rm -rf "$dir/save" "$dir/log"
  ./run.sh "$@" >"$dir/out" 2>&1 </dev/null &
  launcher=$!
}
end() { # sets `status`
  (sleep 120 && pkill -P "$launcher") >/dev/null 2>&1 &
  local limit=$!
  wait "$launcher"
  status=$?
  kill "$limit" 2>/dev/null
}
saved() { # waits for the first checkpoint
  for ((i = 0; i < 400; i++)); do
    [ ! -e "$dir/save/latest" ] || return 0
    sleep 0.1
  done
  return 1
}

begin -n 2 --restart 1 "${train[@]}" --log "$dir/log"
check "a run begins to save" saved
victim=$(ranks_running | tail -n 1)
kill -9 "$victim"
end
check "a killed rank does not end the job" [ "$status" = 0 ]
check "it says from where it goes on" says "going on from step-"
check "the last step is there" [ -e "$dir/save/step-300" ]
check "the log has every step" [ "$(grep -o '"step":[0-9]*,' "$dir/log" | sort -u | wc -l)" = 300 ]

# A terminal that is closed: what a run of its own session does not hear, its launcher passes on, once, however often it
# hears it: mpirun would kill ranks that have not ended two seconds after the next. Here a step takes longer.
begin -n 2 --restart 1 "${train[@]/#300/100000}"
check "a run begins to save" saved
slow=$(ranks_running | tail -n 1)
kill -STOP "$slow"
kill -HUP "$launcher"
sleep 0.05
kill -HUP "$launcher"
sleep 1.5
kill -HUP "$launcher"
sleep 4
kill -CONT "$slow"
end
check "SIGHUP lets the ranks save and end" [ "$status" = 0 ]
check "the step at which it stopped is saved" says "stopped after step $(readlink "$dir/save/latest" | tr -dc 0-9):"
check "no rank is left" [ -z "$(ranks_running)" ]

begin -n 2 "${train[@]}" --dmi 3
end
check "an option that is wrong is not tried again" [ "$status" = 2 ]
check "no restart is said" eval '! says "going on"'

begin -n 1 --restart 2 "${train[@]}" --save /proc/none
end
check "nor is a directory that cannot be" [ "$status" = 2 ]

mkdir "$dir/bin"
printf '#!/bin/bash\nexec kill -9 $$\n' >"$dir/dies" && chmod +x "$dir/dies"
begin -n 1 --restart 1 "$dir/dies" --save "$dir/save"
end
check "faults without a new checkpoint end it" [ "$status" = 137 ]
check "after as many starts as were asked for" [ "$(grep -c 'ended with status 137' "$dir/out")" = 2 ]

# A host that ssh does not reach has no ranks.
printf '#!/bin/bash\necho "$@" >>"%s/ssh"\nexit 255\n' "$dir" >"$dir/bin/ssh" && chmod +x "$dir/bin/ssh"
printf 'gone slots=8\n# a note\nlocalhost max_slots=4 slots = 2' >"$dir/hosts" # the last line has no end
PATH=$dir/bin:$PATH begin --hostfile "$dir/hosts" ./train --device cpu --preset tiny --seq 64 --steps 2 --save "$dir/save" --log "$dir/log"
end
check "the hosts that are left run" [ "$status" = 0 ]
check "the one that is gone is named" says "host gone does not answer"
check "the ranks are theirs" grep -q '"ranks":2' "$dir/log"

rm -rf "$dir/save"
printf 'preset = tiny\ndevice = "cpu"\nsave = "%s"   # here\nseq = 64\nsteps = 2\n' "$dir/save" >"$dir/run.toml"
begin -n 1 ./train --config "$dir/run.toml"
end
check "a file of options says where to save, and on what" [ "$status" = 0 ]
check "and it is saved there" [ -e "$dir/save/step-2" ]

for words in "./train --steps 2|--save DIR" "-n 00 ./train|-n 00: give a number" "./nosuch --save x|./nosuch: no such program" "--restart x ./train|--restart x: give a number" "--what|--what: no such option"; do
  # shellcheck disable=SC2086 # words
  ./run.sh ${words%%|*} >"$dir/out" 2>&1
  status=$?
  check "'${words%%|*}' is refused" [ "$status" = 2 ]
  check "'${words%%|*}' says why" says "${words#*|}"
done
check "--help tells the options" eval './run.sh --help >"$dir/out" && says "--restart N" && ! says "set -uo"'

echo "RESULT $passed $failed 0"
[ "$failed" = 0 ]

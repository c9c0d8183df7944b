# Counts cases, for the scripts that source it: $dir/out is what the last command said. The last line is for test/run.
# shellcheck shell=bash
passed=0
failed=0
skipped=0

# TIMES=1 tells which case was done after how many seconds.
verdict() { # NAME, then what is wrong (nothing if all is well)
  [ -z "${TIMES-}" ] || echo "$SECONDS s: $1"
  if [ -z "$2" ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "FAILED: $1: ${2#; }"
    sed 's/^/    /' "${dir:?}/out" | head -n 20
  fi
}

skip() { # NAME: WHY
  skipped=$((skipped + 1))
  echo "skipped: $1"
}

done_testing() {
  echo "RESULT $passed $failed $skipped"
  [ "$failed" = 0 ]
}

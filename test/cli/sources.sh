#!/bin/bash
# The sources: they compile without CUDA and NCCL, the CPU's kernels in one way, and NOTES.md leads to the right lines.
# shellcheck source=common.sh
. "${BASH_SOURCE[0]%/*}/common.sh"

# Not a part of the make that runs this.
env -u MAKEFLAGS -u MAKELEVEL make --no-print-directory ${TEST_CORES:+"cores=$TEST_CORES"} syntax >"$dir/out" 2>&1
status=$?
wrong=""
[ "$status" = 0 ] || wrong="exit status $status"
! grep -q "[0-9]: warning:" "$dir/out" || wrong="$wrong; it has warnings"
verdict "compiles without CUDA and NCCL" "$wrong"

# A file that has the CPU's kernels in it through another header would be compiled at another level than they are.
wrong=""
kernels=$(sed -n 's/^hot_headers := //p' Makefile)
[ -n "$kernels" ] || wrong="the Makefile names no hot_headers"
for depends in build/lib/program/*.d build/test/*.d; do
  source=${depends#build/} source=${source%.d}
  ! grep -qE "(^| )$kernels" "$depends" || grep -qE "\"$kernels" "$source".c[cu] || wrong="$wrong; $source includes them through a header"
done
verdict "one way to compile the CPU's kernels" "$wrong"

# A kernel that `launch` starts runs beside the one before it until it calls begin_kernel(). One of a series does so at
# its end.
wrong="" kernels=0
of_series() { [ "$1" = "begin_of_series(first);" ] && grep -A 6 "$2(" "$3" | grep -qx "  end_of_series(first);"; }
while IFS='|' read -r file kernel first; do
  kernels=$((kernels + 1))
  [ "$first" = "begin_kernel();" ] || of_series "$first" "$kernel" "$file" ||
    grep -qE "$kernel(<[^<>]*>)?<<<" "$file" || wrong="$wrong; $kernel in $file"
done < <(find attention fsdp model lib -name '*.cu' -o -name '*.cuh' | sort | while read -r file; do
  awk -v file="$file" '
    text != "" && done { sub(/^ */, ""); print file "|" text "|" $0; text = ""; done = 0 }
    /__global__/ { text = " " }
    text != "" { text = text $0; if (/[{]$/) {
      sub(/.*__global__/, "", text); gsub(/__launch_bounds__\(([^()]|\([^()]*\))*\)/, "", text)
      sub(/\(.*/, "", text); sub(/.*[ *]/, "", text); done = 1 } }
    text != "" && /[{].*[}]$/ { text = "" }' "$file"
done)
[ "$kernels" -gt 50 ] || wrong="$wrong; only $kernels kernels were found"
verdict "every kernel begins with begin_kernel()" "$wrong"

# NOTES.md leads to lines by [`name`](file#Lnumber): the line must have the name in it.
wrong="" links=0
: >"$dir/out"
while IFS='|' read -r name file line; do
  links=$((links + 1))
  sed -n "${line}p" "$file" 2>/dev/null | grep -qF -- "$name" || wrong="$wrong; $name is not at $file:$line"
done < <(grep -o '\[`[^`]*`\]([^)#]*#L[0-9]*)' NOTES.md | sed 's/^\[`\([^`]*\)`\](\([^#]*\)#L\([0-9]*\))$/\1|\2|\3/')
[ "$links" -gt 40 ] || wrong="$wrong; only $links links were found"
verdict "the lines that NOTES.md leads to" "$wrong"

done_testing

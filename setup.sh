#!/bin/bash
# Sets the machine up for `make run` and `make test`.
#   ./setup.sh run|test   installs what is missing, by apt, as root or by sudo; otherwise says what to install
#   ./setup.sh ranks 0|1  prints how many ranks `make run` starts: RANKS, else one a GPU (1: built with CUDA), else 4
#   . ./setup.sh env N    sets MPIRUN_FLAGS and the environment for N ranks on this machine
# What is missing is what probe.sh does not find.

# shellcheck source=probe.sh disable=SC1091
. "$(dirname "${BASH_SOURCE[0]}")/probe.sh"

# Sets `packages` to those that `run` or `test` lacks. A compiler that does not work and two MPIs in each other's way are
# not for apt to mend.
list_missing() {
  local trouble
  hash -r
  probe
  trouble=${fact[trouble]}
  if [ -z "$trouble" ] && [ -n "${fact[mpi_mismatch]}" ]; then
    trouble="${fact[mpi_mismatch]}: choose one MPI (Debian: update-alternatives --config mpirun, --config mpi), or set MPICXX"
  fi
  if [ -n "$trouble" ]; then
    echo "error: $trouble" >&2
    exit 1
  fi
  packages=${fact[missing]}
  # Training needs neither Catch2 nor what finds processes.
  [ "$1" = run ] || packages="$packages${packages:+ }${fact[missing_tests]}"
}

install_missing() {
  local packages log sudo=()
  list_missing "$1"
  [ -n "$packages" ] || return 0
  if ! command -v apt-get >/dev/null; then
    echo "missing: $packages (Debian's names); this system has no apt-get: install them by its own means" >&2
    return 1
  fi
  if [ "$(id -u)" != 0 ]; then
    sudo=(sudo -n)
    if ! sudo -n true 2>/dev/null; then
      echo "missing: $packages; to install them, as root: apt-get update && apt-get install -y $packages" >&2
      return 1
    fi
  fi
  echo "installing $packages"
  log=$(mktemp "${TMPDIR:-/tmp}/fsdp-setup.XXXXXX") || return
  # shellcheck disable=SC2086 # a list of packages
  "${sudo[@]}" env TMPDIR="${TMPDIR:-/tmp}" DEBIAN_FRONTEND=noninteractive sh -c \
    'apt-get update -qq; apt-get install -qq -y --no-install-recommends "$@"' sh $packages >"$log" 2>&1 ||
    grep -E '^(E|W|Err)' "$log" | tail -n 3 >&2
  rm -f "$log"
  list_missing "$1"
  [ -z "$packages" ] || echo "error: apt-get could not install: $packages" >&2
  [ -z "$packages" ]
}

count_ranks() {
  local ranks=${RANKS-}
  if [ -z "$ranks" ]; then
    [ "$1" != 1 ] || probe_gpus
    ranks=${fact[gpus]:-0}
    [ "$ranks" != 0 ] || ranks=4
  fi
  if ! [[ $ranks =~ ^[1-9][0-9]*$ ]]; then
    echo "error: RANKS=$ranks: give a number of ranks, 1 or more" >&2
    return 1
  fi
  echo "$ranks"
}

# Flags and quietness of mpirun; the threads of a rank's matmul.
mpi_environment() {
  local ranks=$1 cores
  cores=$(nproc)
  export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS-$((cores > ranks ? cores / ranks : 1))}
  MPIRUN_FLAGS=
  if [ "$(family_of_mpirun)" = "Open MPI" ]; then
    # More ranks than cores is how FSDP is learnt on a laptop. Binding would put each thread of a rank on one core.
    MPIRUN_FLAGS="--oversubscribe --bind-to none"
    [ "$(id -u)" = 0 ] && MPIRUN_FLAGS="$MPIRUN_FLAGS --allow-run-as-root"
    export OMPI_MCA_btl_base_warn_component_unused=0 OMPI_MCA_rmaps_base_oversubscribe=1
  fi
  export MPIRUN_FLAGS
  # On a machine with several GPUs one rank is refused unless somebody says that it is meant, as with RANKS=1.
  [ "$ranks" != 1 ] || export FSDP_ALLOW_SINGLE_RANK=1
}

use_tmpdir() {
  local dir
  dir=$(choose_tmpdir) || return
  [ "$dir" = "${TMPDIR:-/tmp}" ] || export TMPDIR=$dir
}

case ${1-} in
  run | test) use_tmpdir && install_missing "$1" ;;
  ranks) count_ranks "${2-0}" ;;
  env) use_tmpdir && mpi_environment "${2-4}" ;;
  *)
    echo "usage: ./setup.sh run|test, ./setup.sh ranks 0|1, or: . ./setup.sh env RANKS" >&2
    exit 2
    ;;
esac

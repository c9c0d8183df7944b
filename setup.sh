#!/bin/bash
# Sets the machine up for `make run` and `make test`.
#   ./setup.sh run|test   installs what is missing, by apt, as root or by sudo; otherwise says what to install
#   . ./setup.sh env N    sets MPIRUN_FLAGS and the environment for N ranks on this machine

# What is missing, as packages. Headers are looked for with the compiler, so that CPPFLAGS=-Isomewhere counts.
missing_packages() {
  local tool header
  for tool in g++:g++ make:make git:git mpirun:openmpi-bin mpicxx:libopenmpi-dev; do
    command -v "${tool%%:*}" >/dev/null || echo "${tool#*:}"
  done
  for header in CLI/CLI.hpp:libcli11-dev nlohmann/json.hpp:nlohmann-json3-dev cblas.h:libopenblas-dev; do
    # shellcheck disable=SC2046,SC2086 # both are lists of flags
    printf '#include <%s>\n' "${header%%:*}" | g++ ${CPPFLAGS-} $(pkg-config --cflags openblas 2>/dev/null) \
      -E -x c++ - >/dev/null 2>&1 || echo "${header#*:}"
  done
  # shellcheck disable=SC2086
  printf '#if !__has_include(<catch2/catch_all.hpp>) && !__has_include(<catch2/catch.hpp>)\n#error\n#endif\n' |
    g++ ${CPPFLAGS-} -E -x c++ - >/dev/null 2>&1 || echo catch2
}

install_missing() {
  local list sudo=
  list=$(missing_packages | sort -u | paste -sd' ')
  [ -z "$list" ] && return
  if ! command -v apt-get >/dev/null; then
    echo "missing: $list (Debian's names); this system has no apt-get: install them by its own means" >&2
  elif [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
    echo "missing: $list; as root: apt-get install $list" >&2
  else
    [ "$(id -u)" = 0 ] || sudo="sudo -n"
    echo "installing $list"
    # shellcheck disable=SC2086
    $sudo env DEBIAN_FRONTEND=noninteractive sh -c "apt-get update -qq && apt-get install -qq -y \
      --no-install-recommends $list" >/tmp/fsdp-setup.$$ 2>&1 || tail -n 3 /tmp/fsdp-setup.$$ >&2
    rm -f /tmp/fsdp-setup.$$
    hash -r
    list=$(missing_packages | sort -u | paste -sd' ')
    [ -z "$list" ] || echo "could not be installed: $list" >&2
  fi
  # Training needs no Catch2.
  [ -z "$list" ] || { [ "$1" = run ] && [ "$list" = catch2 ]; }
}

# Flags and quietness of mpirun; the threads of a rank's matmul.
mpi_environment() {
  local ranks=$1 cores
  cores=$(nproc)
  export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS-$((cores > ranks ? cores / ranks : 1))}
  MPIRUN_FLAGS=
  if mpirun --version 2>/dev/null | grep -qi 'open.\?mpi\|openrte'; then
    # More ranks than cores is how FSDP is learnt on a laptop. Binding would put each thread of a rank on one core.
    MPIRUN_FLAGS="--oversubscribe --bind-to none"
    [ "$(id -u)" = 0 ] && MPIRUN_FLAGS="$MPIRUN_FLAGS --allow-run-as-root"
    export OMPI_MCA_btl_base_warn_component_unused=0 OMPI_MCA_rmaps_base_oversubscribe=1
  fi
  export MPIRUN_FLAGS
}

case ${1-} in
  run | test) install_missing "$1" ;;
  env) mpi_environment "${2-4}" ;;
  *)
    echo "usage: ./setup.sh run|test, or: . ./setup.sh env RANKS" >&2
    exit 2
    ;;
esac

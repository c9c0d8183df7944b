#!/bin/bash
# Looks for what the build and the runs need. The Makefile and setup.sh both go by what is said here.
#   ./probe.sh             writes build/found, lines `found_NAME=value`, which the Makefile includes
#   ./probe.sh tmpdir      prints the directory for temporary files
#   . ./probe.sh           the functions alone: `probe` sets fact[NAME] to the same values
#
# A library counts as found if a program that calls what the sources call compiles and, where there is something to link,
# links with the flags that the Makefile will use: cblas.h alone may be any BLAS's. CXX, MPICXX, CPPFLAGS, CXXFLAGS, LDFLAGS
# and LDLIBS count as they do in the build. What was found is kept in build/found until a compiler, a flag or one of the
# files looked for changes; what was not found is looked for again each time.

declare -gA fact
scratch=

# The Makefile's flags are words of the shell, quotes included.
read_flags() {
  eval "compiler=(${CXX:-g++}) wrapper=(${MPICXX:-mpicxx})"
  eval "flags=(${CPPFLAGS-} ${CXXFLAGS-}) link_flags=(${LDFLAGS-}) link_libs=(${LDLIBS-})"
}

# ------------------------------------------------------------------------------------------------------ temporary files
# Compilers, mpirun and apt need a directory for them; a full one makes them fail in ways that name everything else.
least_mb=200

takes_files() { # DIR
  local file room written
  file=$(mktemp "$1/fsdp.XXXXXX" 2>/dev/null) || return
  head -c 1048576 /dev/zero 2>/dev/null >"$file"
  written=$?
  rm -f "$file"
  # shellcheck disable=SC2207 # two numbers
  room=($(stat -f -c '%a %S' "$1"))
  [ "$written" = 0 ] && [ $((room[0] * room[1] / 1048576)) -ge $least_mb ]
}

# Prints the first directory that will do, and on stderr why it is not the usual one.
choose_tmpdir() {
  local usual=${TMPDIR:-/tmp} dir dirs=()
  dirs=("$usual")
  [ "$usual" = /tmp ] || dirs+=(/tmp)
  dirs+=(/var/tmp "$PWD/build/tmp")
  for dir in "${dirs[@]}"; do
    [ "$dir" != "$PWD/build/tmp" ] || mkdir -p "$dir" 2>/dev/null
    takes_files "$dir" || continue
    [ "$dir" = "$usual" ] ||
      echo "$usual cannot be written or has less than $least_mb MB free: temporary files go to $dir" >&2
    echo "$dir"
    return
  done
  echo "error: no room for temporary files: none of ${dirs[*]} can be written and has $least_mb MB free; make room, or" \
    "set TMPDIR" >&2
  return 1
}

# --------------------------------------------------------------------------------------------------------- the compiler
# builds check|link NAME PROGRAM FLAG...: whether the program compiles (check) or also links with these flags.
builds() {
  local how=$1 source=$scratch/$2.cc
  printf '%s\n' "$3" >"$source"
  shift 3
  if [ "$how" = check ]; then
    "${compiler[@]}" -std=c++17 "${flags[@]}" "$@" -fsyntax-only "$source"
  else
    "${compiler[@]}" -std=c++17 "${flags[@]}" "$source" -o "${source%.cc}" "${link_flags[@]}" "$@" "${link_libs[@]}"
  fi >"${source%.cc}.log" 2>&1
}

probe_cxx() {
  command -v "${compiler[0]}" >/dev/null || return
  if builds link cxx 'static_assert(__cplusplus >= 201703L, "C++17"); int main() {}'; then
    echo "cxx=${compiler[*]##*/} $("${compiler[@]}" -dumpfullversion -dumpversion 2>/dev/null)"
  else
    echo "trouble=${compiler[*]} ${flags[*]} ${link_flags[*]} ${link_libs[*]} builds no program:" \
      "$(grep -m 1 -i -E 'error|cannot|no space' "$scratch/cxx.log" || head -n 1 "$scratch/cxx.log")"
  fi
}

# ------------------------------------------------------------------------------------------------------------------ MPI
# Open MPI, or MPICH and its kin (Intel's, MVAPICH); else empty. Programs of the one do not start under the other.
family_of_mpirun() {
  case $(mpirun --version 2>/dev/null | head -n 1) in
    *"Open MPI"* | *OpenRTE*) echo "Open MPI" ;;
    *HYDRA* | *Intel*MPI*) echo MPICH ;;
  esac
}

probe_mpirun() {
  command -v mpirun >/dev/null || return
  echo "mpirun=yes"
  echo "mpirun_family=$(family_of_mpirun)"
  echo "mpirun_version=$(mpirun --version 2>/dev/null |
    sed -n '1s/^mpirun (\(.*\))/\1/p; /HYDRA/,$s/^ *Version: */MPICH /p; s/^Intel.*Version/Intel MPI/p' | head -n 1)"
}

probe_mpi() {
  local compile link word include=() libs=()
  # Open MPI's way of asking, then that of MPICH and its kin. Without a compiler wrapper: the usual place.
  compile=$("${wrapper[@]}" --showme:compile 2>/dev/null) || compile=$("${wrapper[@]}" -compile_info 2>/dev/null)
  link=$("${wrapper[@]}" --showme:link 2>/dev/null) || link=$("${wrapper[@]}" -link_info 2>/dev/null) || link=-lmpi
  # System directories: their headers owe us no clean warnings. The C++ bindings are not used.
  for word in $compile; do
    case $word in -I?*) include+=(-isystem "${word#-I}") ;; esac
  done
  for word in $link; do
    case $word in
      -lmpi_cxx | -lmpichcxx | -lmpicxx) ;;
      -L* | -l* | -Wl,*) libs+=("$word") ;;
    esac
  done
  include+=(-DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX)
  builds link mpi '#include <mpi.h>
int main(int argc, char** argv) {
  int provided;
  MPI_Comm host;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  return MPI_Finalize();
}' "${include[@]}" "${libs[@]}" || return
  echo "mpi=yes"
  echo "mpi_flags=${include[*]}"
  echo "mpi_libs=${libs[*]}"
  printf '#include <mpi.h>\n#ifdef OPEN_MPI\n"Open MPI"\n#elif defined(MPICH_VERSION)\n"MPICH"\n#endif\n' |
    "${compiler[@]}" "${flags[@]}" "${include[@]}" -E -P -x c++ - 2>/dev/null | sed -n 's/^"\(.*\)"$/mpi_family=\1/p'
}

# ------------------------------------------------------------------------------------------------------------ libraries
# Other libraries' cblas.h and libblas may stand in the usual places (Debian's alternatives choose), so the directories
# that hold OpenBLAS alone are tried as well.
probe_openblas() {
  local program include libs dir lib word
  program='#include <cblas.h>
int main() {
  float f = 1;
  double d = 1;
  openblas_set_num_threads(1);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, 1, 1, 1, 1, &f, 1, &f, 1, 0, &f, 1);
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, 1, 1, 1, 1, &d, 1, &d, 1, 0, &d, 1);
}'
  try_openblas() {
    # shellcheck disable=SC2086 # both are lists of flags
    builds link openblas "$program" $include $libs || return
    printf 'openblas=yes\nopenblas_flags=%s\nopenblas_libs=%s\n' "$include" "$libs"
  }
  if libs=$(pkg-config --libs openblas 2>/dev/null); then
    include=
    for word in $(pkg-config --cflags openblas 2>/dev/null); do
      case $word in -I?*) include="${include:+$include }-isystem ${word#-I}" ;; esac
    done
    try_openblas && return
  fi
  include='' libs=-lopenblas
  try_openblas && return
  # Debian: include/TRIPLET/openblas-KIND and lib/TRIPLET/openblas-KIND; Fedora: include/openblas; make install: /opt.
  for dir in /usr/include/*/openblas-* /usr/include/openblas /usr/local/include/openblas /opt/OpenBLAS/include; do
    [ -e "$dir/cblas.h" ] || continue
    include="-isystem $dir"
    case $dir in
      */openblas-*) lib=${dir/include/lib} ;;
      /opt/*) lib=/opt/OpenBLAS/lib ;;
      *) lib= ;;
    esac
    libs="${lib:+-L$lib -Wl,-rpath,$lib }-lopenblas"
    try_openblas && return
  done
  # LDLIBS may name it.
  include='' libs=''
  try_openblas && return
  ! builds check cblas '#include <cblas.h>' || echo "openblas_note=cblas.h is of another library"
}

probe_cli11() {
  builds check cli11 '#include <CLI/CLI.hpp>
int main() { CLI::App app; std::string s; app.add_option("--s", s)->check(CLI::Range(0, 1)); app.set_config("--config"); }' &&
    echo cli11=yes
}

probe_json() {
  builds check json '#include <nlohmann/json.hpp>
int main() { return nlohmann::json::parse("{}").value("a", 0); }' && echo json=yes
}

probe_xxhash() {
  builds check xxhash '#define XXH_INLINE_ALL
#include <xxhash.h>
int main() { return int(XXH3_64bits("", 0)); }' && echo xxhash=yes
}

probe_protozero() {
  builds check protozero '#include <protozero/pbf_writer.hpp>
int main() { std::string s; protozero::pbf_writer w(s); w.add_double(1, 0); }' && echo protozero=yes
}

# Version 3 has a library to link; test/catch.h takes it where its header is.
probe_catch2() {
  if builds check catch2 '#if !__has_include(<catch2/catch_all.hpp>)
#error
#endif'; then
    builds link catch2 '#include <catch2/catch_all.hpp>
TEST_CASE("one") { REQUIRE(1 == 1); }
int main() { return Catch::Session().run(); }' -lCatch2 && printf 'catch2=v3\ncatch2_libs=-lCatch2\n'
  else
    builds check catch2 '#include <catch2/catch.hpp>
TEST_CASE("one") { REQUIRE(1 == 1); }' && echo catch2=v2
  fi
}

# ----------------------------------------------------------------------------------------------------------------- GPUs
# Those that the programs can use: capability 8.0 (bf16), and no more than CUDA_VISIBLE_DEVICES names.
probe_gpus() {
  local names caps n visible
  names=$(nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.[0-9], ')
  fact[gpu_name]=$(printf '%s\n' "$names" | sed -n 's/^[^,]*, //p' | sort | uniq -c | sed 's/^ *\([0-9]*\) /\1 x /' | paste -sd,)
  caps=$(printf '%s\n' "$names" | sed -n 's/^\([0-9]*\)\.\([0-9]\),.*/\1\2/p' | awk '$1 >= 80')
  fact[gpu_caps]=$(printf '%s\n' "$caps" | sort -u | paste -sd' ')
  n=$(printf '%s' "$caps" | grep -c '')
  if [ "${CUDA_VISIBLE_DEVICES-unset}" != unset ]; then
    visible=$(printf '%s' "${CUDA_VISIBLE_DEVICES%%-1*}" | tr ',' '\n' | grep -c .)
    [ "$visible" -ge "$n" ] || n=$visible
  fi
  fact[gpus]=$n
}

# -------------------------------------------------------------------------------------------------------------- in all
# All that the facts below hang on: flags, tools, and the files looked for where compilers look.
inputs() {
  local word dirs=(/usr/include /usr/include/*-linux-gnu /usr/local/include) libs=(/usr/lib /usr/lib64 /usr/lib/*-linux-gnu /usr/local/lib)
  local -a paths
  for word in "${flags[@]}" "${link_flags[@]}" "${link_libs[@]}"; do
    case $word in
      -I?*) dirs+=("${word#-I}") ;;
      -L?*) libs+=("${word#-L}") ;;
      -*) ;;
      *) dirs+=("$word") paths+=("$word") ;;
    esac
  done
  for word in mpi.h cblas.h CLI/CLI.hpp nlohmann/json.hpp xxhash.h protozero/pbf_writer.hpp catch2/catch_all.hpp catch2/catch.hpp; do
    paths+=("${dirs[@]/%//$word}")
  done
  for word in openblas mpi mpich Catch2; do paths+=("${libs[@]/%//lib$word.so}" "${libs[@]/%//lib$word.a}"); done
  paths+=("${BASH_SOURCE[0]}" /var/lib/dpkg/status /usr/include/*/openblas-* /opt/OpenBLAS/include/cblas.h)
  for word in "${compiler[0]}" "${wrapper[0]}" mpirun pkg-config; do paths+=("$(command -v "$word")"); done
  printf '%s\n' "${compiler[*]}|${wrapper[*]}|${flags[*]}|${link_flags[*]}|${link_libs[*]}" "$PATH" "${CPATH-}" \
    "${CPLUS_INCLUDE_PATH-}" "${LIBRARY_PATH-}" "${PKG_CONFIG_PATH-}"
  stat -L -c '%n %y %i' "${paths[@]}" 2>/dev/null
}

read_facts() { # FILE...: lines name=value
  local name value
  while IFS='=' read -r name value; do fact[$name]=$value; done < <(cat "$@" 2>/dev/null)
}

names=(cxx mpi mpi_family mpi_flags mpi_libs mpirun mpirun_family mpirun_version openblas openblas_note openblas_flags
  openblas_libs cli11 json xxhash protozero catch2 catch2_libs gpus gpu_name gpu_caps missing missing_tests mpi_mismatch trouble key)

# Debian's packages for what was not found: what the programs need, then what the tests need besides.
name_missing() {
  local list=() tests=() dev=libopenmpi-dev run=openmpi-bin
  [ "${fact[mpirun_family]-}" != MPICH ] || dev=libmpich-dev
  [ "${fact[mpi_family]-}" != MPICH ] || run=mpich
  case ${compiler[0]##*/} in
    *g++*) [ -n "${fact[cxx]-}" ] || list+=("${compiler[0]##*/}") ;;
    *) [ -n "${fact[cxx]-}" ] || list+=(g++) ;;
  esac
  [ -n "${fact[mpi]-}" ] || list+=("$dev")
  [ -n "${fact[mpirun]-}" ] || list+=("$run")
  [ -n "${fact[openblas]-}" ] || list+=(libopenblas-dev)
  [ -n "${fact[cli11]-}" ] || list+=(libcli11-dev)
  [ -n "${fact[json]-}" ] || list+=(nlohmann-json3-dev)
  [ -n "${fact[xxhash]-}" ] || list+=(libxxhash-dev)
  [ -n "${fact[protozero]-}" ] || list+=(libprotozero-dev)
  fact[missing]="${list[*]}"
  [ -n "${fact[catch2]-}" ] || tests+=(catch2)
  { command -v pkill && command -v pgrep; } >/dev/null || tests+=(procps)
  fact[missing_tests]="${tests[*]}"
  fact[mpi_mismatch]=
  if [ -n "${fact[mpi_family]-}" ] && [ -n "${fact[mpirun_family]-}" ] &&
    [ "${fact[mpi_family]}" != "${fact[mpirun_family]}" ]; then
    fact[mpi_mismatch]="mpirun is of ${fact[mpirun_family]}, but ${wrapper[*]} builds for ${fact[mpi_family]}"
  fi
}

probe() {
  local key name
  local -a compiler wrapper flags link_flags link_libs
  fact=()
  read_flags
  key=$(inputs | cksum)
  if [ "$(sed -n 's/^found_key=//p' build/found 2>/dev/null)" = "$key" ]; then
    read_facts <(sed 's/^found_//' build/found)
  fi
  fact[key]=$key
  fact[trouble]=
  fact[openblas_note]=
  if ! scratch=$(mktemp -d "${TMPDIR:-/tmp}/fsdp.XXXXXX"); then
    fact[trouble]="no directory for temporary files"
    return 1
  fi
  [ -n "${fact[cxx]-}" ] || read_facts <(probe_cxx)
  if [ -n "${fact[cxx]-}" ]; then
    for name in mpi mpirun openblas cli11 json xxhash protozero catch2; do
      [ -n "${fact[$name]-}" ] || "probe_$name" >"$scratch/$name.found" &
    done
    wait
    read_facts "$scratch"/*.found
  else
    read_facts <(probe_mpirun)
  fi
  rm -rf "$scratch"
  probe_gpus
  name_missing
  { mkdir -p build && for name in "${names[@]}"; do echo "found_$name=${fact[$name]-}"; done >"build/found.$$" &&
    mv -f "build/found.$$" build/found; } 2>/dev/null || fact[trouble]="the directory $PWD/build cannot be written"
  [ -z "${fact[trouble]}" ]
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  case ${1-} in
    tmpdir) choose_tmpdir ;;
    *) probe || { echo "error: ${fact[trouble]}" >&2 && exit 1; } ;;
  esac
fi

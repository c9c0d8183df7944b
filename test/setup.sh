#!/bin/bash
# What setup.sh, probe.sh and `make run` choose, on machines that are played: a folder with the tools, headers and
# libraries that a case says are there, as the only PATH. Its g++ is the real one, kept to the folder's headers, and takes
# a library for present if the folder has it; apt-get installs into the folder. The last line is for test/run: RESULT
# passed failed skipped.
# shellcheck disable=SC2016 # the tools' scripts expand when they run
cd "$(dirname "$0")/.." || exit
export LC_ALL=C # numbers of awk, the order of sort
top=$PWD
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
# shellcheck source=verdict.sh
. test/verdict.sh
real_cxx=$(command -v "${CXX:-g++}")

root=$dir/machine
project="$root/a project"

tool() { # DIRECTORY/NAME, then the script on stdin
  { printf '#!%s\nroot="%s"\n' "$BASH" "$root" && cat; } >"$1"
  chmod +x "$1"
}

# Each package is a folder that is copied onto the machine.
package() { mkdir -p "$dir/packages/$1"/{bin,include/{CLI,nlohmann,protozero,catch2},lib} && cd "$dir/packages/$1" || exit; } # NAME

# The real compiler's opinion of the source, without the system's headers; a library is there if the machine has its file.
package base # copies, so that nothing here can write to the machine that the test runs on
for name in bash sh env make ls cp sed grep awk sort uniq paste head tail tr cat mktemp rm mkdir mv stat cksum nproc dirname \
  cmp touch chmod pkill pgrep; do
  cp -L "$(type -P $name)" bin/
done

package g++
tool bin/g++ <<EOS
real='$real_cxx' path='$PATH'
$(cat <<'EOT'
[ "$1" != -dumpfullversion ] || { echo 12.2.0; exit; }
case "$*" in
  *-fsyntax-only* | *-lopenblas*) ;;
  */openblas.cc*) echo "error: undefined reference to cblas_sgemm" >&2 && exit 1 ;;
esac
echo "$*" >>"$root/compiled"
echo "${TMPDIR-}" >"$root/tmpdir"
words=() out='' check=-fsyntax-only source='' links=1
[[ $* != *-fsyntax-only* ]] || links=
while [ $# -gt 0 ]; do
  case $1 in
    -isystem) shift ;;
    -o) out=$2; shift ;;
    -l*) [ -z "$links" ] || [ -e "$root/lib/${1#-l}" ] || [[ $1 == -l@(pthread|dl) ]] || { echo "error: cannot find $1" >&2; exit 1; } ;;
    -E) check=; words+=("$1") ;;
    *.o | -L* | -Wl,*) ;;
    *.cc | *.cu | -) source=1; words+=("$1") ;;
    *) words+=("$1") ;;
  esac
  shift
done
[ -z "$source" ] || PATH=$path "$real" -nostdinc -I"$root/include" $check "${words[@]}" || exit
[ -z "$out" ] || { printf '#!/bin/sh\necho "trained with $*"\n' >"$out" && chmod +x "$out"; }
EOT
)
EOS

package openmpi-bin
tool bin/mpirun <<'EOS'
[ "$1" != --version ] || { echo "mpirun (Open MPI) 4.1.4" && exit; }
while [ "$1" != -np ]; do shift; done
echo "mpirun starts $2 ranks" && shift 2 && exec "$@"
EOS
package mpich
tool bin/mpirun <<'EOS'
printf 'HYDRA build details:\n    Version:   4.0.2\n'
EOS

cat >"$dir/mpi.h" <<'EOS'
typedef int MPI_Comm;
enum { MPI_THREAD_MULTIPLE, MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, MPI_INFO_NULL };
int MPI_Init_thread(int*, char***, int, int*);
int MPI_Comm_split_type(MPI_Comm, int, int, int, MPI_Comm*);
int MPI_Finalize();
EOS
package libopenmpi-dev
tool bin/mpicxx <<<'case $1 in --showme:compile) echo "-I/nowhere" ;; --showme:link) echo "-lmpi" ;; *) exit 1 ;; esac'
{ echo '#define OPEN_MPI 1' && cat "$dir/mpi.h"; } >include/mpi.h
touch lib/mpi
package libmpich-dev
tool bin/mpicxx <<<'case $1 in -compile_info) echo "g++ -I/nowhere" ;; -link_info) echo "g++ -lmpich" ;; *) exit 1 ;; esac'
{ printf '#define MPICH_VERSION "4"\n#define MPICH 1\n' && cat "$dir/mpi.h"; } >include/mpi.h
touch lib/mpich

package libblas-dev
cat >include/cblas.h <<'EOS'
enum Order { CblasRowMajor, CblasNoTrans, CblasTrans };
void cblas_sgemm(Order, Order, Order, int, int, int, float, const float*, int, const float*, int, float, float*, int);
void cblas_dgemm(Order, Order, Order, int, int, int, double, const double*, int, const double*, int, double, double*, int);
EOS
touch lib/blas
package libopenblas-dev
{ cat ../libblas-dev/include/cblas.h && echo 'void openblas_set_num_threads(int);'; } >include/cblas.h
touch lib/openblas

package libcli11-dev
cat >include/CLI/CLI.hpp <<'EOS'
namespace std { struct string {}; }
namespace CLI {
struct Range { Range(int, int) {} };
struct App { App* add_option(const char*, std::string&) { return this; } void check(Range) {} void set_config(const char*) {} };
}
EOS
package nlohmann-json3-dev
cat >include/nlohmann/json.hpp <<'EOS'
namespace nlohmann { struct json { static json parse(const char*) { return {}; } int value(const char*, int) { return 0; } }; }
EOS
package libxxhash-dev
echo 'static inline unsigned long long XXH3_64bits(const void*, unsigned long) { return 0; }' >include/xxhash.h
package libprotozero-dev
cat >include/protozero/pbf_writer.hpp <<'EOS'
namespace std { struct string {}; }
namespace protozero { struct pbf_writer { pbf_writer(std::string&) {} void add_double(int, double) {} }; }
EOS

package catch2
printf '#define TEST_CASE(name) static void test()\n#define REQUIRE(x) (void)(x)\n' >include/catch2/catch.hpp

package catch2-v3
printf 'namespace Catch { struct Session { int run() { return 0; } }; }\n' | cat ../catch2/include/catch2/catch.hpp - \
  >include/catch2/catch_all.hpp
touch lib/Catch2

# An apt-get that knows no package named in the file `refused`.
package apt
tool bin/apt-get <<'EOS'
[ "$1" = install ] || exit 0
id -u >"$root/installed-by"
for word; do
  case $word in install | -*) continue ;; esac
  ! grep -qsx -e "$word" "$root/refused" || { echo "E: Unable to locate package $word"; exit 100; }
  echo "$word" >>"$root/asked"
  cp -r "$root/../packages/$word/." "$root"
done
EOS
cd "$top" || exit

all=(g++ openmpi-bin libopenmpi-dev libopenblas-dev libcli11-dev nlohmann-json3-dev libxxhash-dev libprotozero-dev)

# machine PACKAGE...: a fresh one with these, apt-get and root's rights; its project lies in a path with a space.
machine() {
  local name
  rm -rf "$root"
  mkdir -p "$root/tmp" "$project"
  cp setup.sh probe.sh Makefile "$project"
  for name in base apt "$@"; do cp -r "$dir/packages/$name/." "$root"; done
  tool "$root/bin/id" <<<'echo 0'
}

# at NAME=VALUE... COMMAND...: in the project on that machine, with nothing else in the environment; sets status.
at() {
  (cd "$project" && env -i PATH="$root/bin" HOME="$root" TMPDIR="$root/tmp" "$@") >"$dir/out" 2>&1 </dev/null
  status=$?
}

# judge NAME STATUS WORDS...: the last command ended with STATUS, and said each of these.
judge() {
  local name=$1 wrong='' word
  [ "$status" = "$2" ] || wrong="exit status $status, not $2"
  shift 2
  for word in "$@"; do grep -qF -e "$word" "$dir/out" || wrong="$wrong; it does not say '$word'"; done
  verdict "$name" "$wrong"
}

equal() { verdict "$1" "$([ "$2" = "$3" ] || echo "'$2', not '$3'")"; } # NAME VALUE EXPECTED
asked() { paste -sd' ' "$root/asked" 2>/dev/null; }                     # the packages that apt-get was asked for
lines() { grep -c '' "$dir/out"; }

machine "${all[@]}" catch2
at ./setup.sh run
judge "nothing is missing" 0
equal "nothing is missing: nothing is said" "$(cat "$dir/out")" ""
equal "nothing is missing: nothing is installed" "$(asked)" ""
equal "no temporary file is left" "$(ls "$root/tmp")" ""
rm -f "$root/compiled"
at ./setup.sh run
judge "what was found is not looked for again" 0
equal "what was found is not looked for again: the compiler rests" "$(cat "$root/compiled" 2>/dev/null)" ""

machine "${all[@]}"
at CPPFLAGS="-I'$root/include'" ./setup.sh run
rm "$root/include/cblas.h"
at CPPFLAGS="-I'$root/include'" ./setup.sh run
judge "what was removed is noticed" 0 "installing libopenblas-dev"

machine
at ./setup.sh run
judge "bare, as root" 0 "installing g++"
equal "bare: what apt-get is asked for" "$(asked)" "g++ libopenmpi-dev openmpi-bin libopenblas-dev libcli11-dev nlohmann-json3-dev libxxhash-dev libprotozero-dev"

machine g++
at ./setup.sh run
judge "a compiler alone" 0
equal "no temporary file is left by apt-get" "$(ls "$root/tmp")" ""
equal "a compiler alone: what apt-get is asked for" "$(asked)" "libopenmpi-dev openmpi-bin libopenblas-dev libcli11-dev nlohmann-json3-dev libxxhash-dev libprotozero-dev"

machine "${all[@]}" libblas-dev # overwrites OpenBLAS's header
at make train
judge "make: cblas.h of another library" 2 "missing: libopenblas-dev" "cblas.h is of another library"
at ./setup.sh run
judge "cblas.h of another library" 0 "installing libopenblas-dev"
equal "cblas.h of another library: what apt-get is asked for" "$(asked)" libopenblas-dev

machine "${all[@]}"
rm "$root/lib/openblas" "$root/lib/mpi"
at ./setup.sh run
equal "headers without their libraries" "$status $(asked)" "0 libopenmpi-dev libopenblas-dev"

machine "${all[@]}"
rm "$root/include/cblas.h"
tool "$root/bin/id" <<<'echo 1000'
at ./setup.sh run
judge "an ordinary user without sudo" 1 "as root: apt-get update && apt-get install -y libopenblas-dev"
equal "an ordinary user without sudo: one line" "$(lines)" 1
equal "an ordinary user without sudo: nothing is installed" "$(asked)" ""
at make run
judge "an ordinary user: make run builds nothing" 2 "apt-get install -y libopenblas-dev"
equal "an ordinary user: make run builds nothing but the probe's notes" "$(ls "$project/build")" found
tool "$root/bin/sudo" <<<'[ "$1" = -n ] && shift && [ "$1" != true ] || exit 0
printf "#!/bin/sh\necho 0\n" >"$root/bin/id" && exec "$@"'
at ./setup.sh run
judge "an ordinary user with sudo" 0 "installing libopenblas-dev"
equal "an ordinary user with sudo: apt-get runs as root" "$(cat "$root/installed-by")" 0

machine "${all[@]}"
rm "$root/include/cblas.h" "$root/bin/apt-get"
at ./setup.sh run
judge "no apt-get" 1 "missing: libopenblas-dev" "no apt-get"

machine "${all[@]}"
rm "$root/include/cblas.h"
echo libopenblas-dev >"$root/refused"
at ./setup.sh run
judge "apt-get fails" 1 "Unable to locate package libopenblas-dev" "could not install: libopenblas-dev"

machine "${all[@]}"
at ./setup.sh run
equal "training needs no Catch2" "$status $(asked)" "0 "
at ./setup.sh test
judge "the tests need Catch2" 0 "installing catch2"
equal "the tests need Catch2 alone" "$(asked)" catch2
machine "${all[@]}"
rm "$root/bin/pkill"
at ./setup.sh run
equal "training looks for no processes" "$status $(asked)" "0 "
at ./setup.sh test
equal "the tests do" "$(asked)" "catch2 procps"
machine "${all[@]}" catch2-v3
at ./setup.sh test
equal "Catch2 version 3 will do" "$status $(asked)" "0 "
rm "$root/lib/Catch2" "$project/build/found"
at ./setup.sh test
equal "Catch2 version 3 without its library will not" "$(asked)" catch2

machine "${all[@]}" libmpich-dev
at ./setup.sh run
judge "mpirun of one MPI, mpicxx of another" 1 "mpirun is of Open MPI, but mpicxx builds for MPICH"
equal "mpirun of one MPI, mpicxx of another: one line, nothing installed" "$(lines) $(asked)" "1 "
machine "${all[@]}" mpich libmpich-dev
at ./setup.sh run
equal "MPICH alone will do" "$status $(asked)" "0 "
machine g++ mpich libopenblas-dev libcli11-dev nlohmann-json3-dev libxxhash-dev libprotozero-dev
at ./setup.sh run
equal "MPICH's mpirun asks for MPICH's headers" "$status $(asked)" "0 libmpich-dev"

machine "${all[@]}"
at CPPFLAGS=-no-such-flag ./setup.sh run
judge "a compiler that builds nothing" 1 "builds no program" "no-such-flag"
equal "a compiler that builds nothing: one line, nothing installed" "$(lines) $(asked)" "1 "

# Ranks.
gpus() { # LINE...: what nvidia-smi says
  printf '%s\n' "$@" >"$root/gpus"
  tool "$root/bin/nvidia-smi" <<<'cat "$root/gpus"'
}
ranks() { # NAME EXPECTED [NAME=VALUE...] CUDA
  local name=$1 expected=$2
  shift 2
  at "${@:1:$#-1}" ./setup.sh ranks "${@:$#}"
  equal "$name" "$status $(cat "$dir/out")" "0 $expected"
}
machine "${all[@]}"
ranks "no GPU: 4 ranks" 4 1
gpus "No devices were found"
ranks "no working GPU: 4 ranks" 4 1
gpus "9.0, NVIDIA H200" "9.0, NVIDIA H200"
ranks "two GPUs: 2 ranks" 2 1
ranks "two GPUs, the CPU backend alone: 4 ranks" 4 0
ranks "two GPUs, one visible: 1 rank" 1 CUDA_VISIBLE_DEVICES=1 1
ranks "two GPUs, none visible: 4 ranks" 4 CUDA_VISIBLE_DEVICES= 1
ranks "RANKS decides" 3 RANKS=3 1
gpus "9.0, NVIDIA H200" "7.0, Tesla V100"
ranks "a GPU without bf16 does not count" 1 1
at RANKS=two ./setup.sh ranks 1
judge "RANKS is a number" 1 "RANKS=two"

# From `make run` to its last lines.
touch "$project/train.cu"
at CUDA=0 make run ARGS="--steps 2"
judge "make run without CUDA" 0 "mpirun starts 4 ranks" "trained with --seq 4096 --steps 2"
equal "make run ends with three lines" "$(tail -n 3 "$dir/out" | cut -c1-5 | paste -sd/)" "done:/next:/     "
at CUDA=0 RANKS=2 make run
judge "make run with RANKS in the environment" 0 "mpirun starts 2 ranks" "2 ranks on the CPU"
gpus "9.0, NVIDIA H200" "9.0, NVIDIA H200" "9.0, NVIDIA H200"
mkdir -p "$root/cuda/bin" "$root/cuda/lib64" "$root/cuda/include"
tool "$root/cuda/bin/nvcc" <<'EOS'
case " $* " in
  *" --version "*) echo "release 13.0, V13" ;;
  *" --list-gpu-code "*) printf 'sm_80\nsm_90\n' ;;
  *" -o "*) while [ "$1" != -o ]; do shift; done && touch "$2" ;;
esac
EOS
touch "$root/lib/cublasLt" "$root/lib/cudart_static" "$root/lib/dl" "$root/lib/rt"
at CUDA_HOME="$root/cuda" NCCL=0 make run
judge "make run on three GPUs" 0 "mpirun starts 3 ranks" "3 ranks on 3 x NVIDIA H200" "sm_90a"

# Temporary files.
machine "${all[@]}"
at TMPDIR="$root/absent" ./setup.sh run
judge "TMPDIR that is not there" 0 "$root/absent cannot be written" "temporary files go to /"
tool "$root/bin/mktemp" <<EOS
for word; do case \$word in /tmp/fsdp* | /var/tmp/fsdp*) exit 1 ;; esac; done
exec '$dir/packages/base/bin/mktemp' "\$@"
EOS
at TMPDIR=/tmp ./setup.sh run
judge "/tmp that cannot be written" 0 "temporary files go to $project/build/tmp"
touch "$project/train.cu"
at TMPDIR=/tmp CUDA=0 make train
judge "make: /tmp that cannot be written" 0 "temporary files go to $project/build/tmp"
equal "make: /tmp that cannot be written: said once" "$(grep -c 'temporary files go' "$dir/out")" 1
equal "make: /tmp that cannot be written: the compiler's directory" "$(cat "$root/tmpdir")" "$project/build/tmp"
cp "$dir/packages/base/bin/mktemp" "$root/bin/"
tool "$root/bin/stat" <<EOS
[ "\$1" != -f ] || { echo 100 4096; exit; }
exec '$dir/packages/base/bin/stat' "\$@"
EOS
at ./setup.sh run
judge "no room for temporary files" 1 "no room for temporary files" "set TMPDIR"
equal "no room for temporary files: one line, nothing installed" "$(lines) $(asked)" "1 "

done_testing

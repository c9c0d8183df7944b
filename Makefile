# fsdp.cu: `make run` trains, `make test` tests; both install what is missing. `make help` lists the rest.
#
# Nothing has to be configured: the first half of this file looks for CUDA, NCCL, MPI and the header libraries and says
# in a table what it found, the second half builds. What can be set, on the command line or in the environment:
#   CUDA=0          build the CPU backend alone (by itself where there is no nvcc)
#   NCCL=0          leave NCCL out: collectives then go over MPI through host memory
#   CUPTI=0         leave CUPTI out: --profile and --trace then show no kernels
#   ARCH="90a 80"   GPU architectures (by itself: this machine's GPUs; without a GPU 8.0 and 9.0a)
#   SAN=1           AddressSanitizer and UBSan, for the CPU backend alone; `make test SAN=1` runs all tests under them
#   CUDA_HOME, NCCL_HOME, MPICXX, CXX, CPU_ARCH, CPPFLAGS, CXXFLAGS, NVCCFLAGS, LDFLAGS, LDLIBS; DEBUG=1 adds -g -lineinfo
#   COMMIT          what --version and results say, for a source tree without git
#   RANKS, ARGS     for `make run`: how many ranks (by itself one a GPU, 4 without a GPU), more options of ./train

SHELL := /bin/bash
CPU_ARCH ?= native
ARGS ?=

.DEFAULT_GOAL := all
.PHONY: all run start test soak fuzz faults tests tables notes syntax clean format help force
.DELETE_ON_ERROR:
.SUFFIXES:

hash := \#
comma := ,
cores := $(shell nproc 2>/dev/null || echo 2)
ifeq ($(filter -j%,$(MAKEFLAGS)),)
  ifeq ($(MAKELEVEL),0)
    MAKEFLAGS += -j$(cores)
  endif
endif

help:
	@printf '%s\n' \
	  'make             build ./train and ./bench' \
	  'make run         install what is missing, build, train with a rank a GPU, 4 without a GPU' \
	  '                 (RANKS=2 decides; ARGS="--dim 256 ..." goes to ./train)' \
	  'make test        install what is missing, build, run every test' \
	  'make tests       build the tests: build/test_unit, build/test_ranks' \
	  'make faults      kill, stop and signal runs, and see how they end: a table (a short form is part of make test)' \
	  'make tables      make results/ anew, with PyTorch beside, and from it the pictures and the tables of the texts' \
	  '                 (GPUS=2: with so many; ONLY=depth,seq: those sweeps; CONTINUE=1: go on where it stopped)' \
	  'make notes       pictures and tables from results/ as it is' \
	  'make format      clang-format every source' \
	  'make soak        kill ranks at random, go on, compare with an undisturbed run (MINUTES=30)' \
	  'make fuzz        hand made-up inputs to every parser (clang; SECONDS=60 for each)' \
	  'make clean       remove what was built' \
	  'CUDA=0           the CPU backend alone; NCCL=0, CUPTI=0, ARCH="90a 80", CPU_ARCH=x86-64-v3, DEBUG=1, SAN=1: see the Makefile'

# A full /tmp would fail every compiler, apt-get and mpirun.
ifneq ($(filter-out clean format help,$(or $(MAKECMDGOALS),all)),)
  tmpdir := $(shell ./probe.sh tmpdir)
  ifeq ($(tmpdir),)
    $(error nothing was built)
  endif
  ifneq ($(tmpdir),$(or $(TMPDIR),/tmp))
    export TMPDIR := $(tmpdir)
  endif
endif

# ---------------------------------------------------------------------------------------------------- run and test
# These two need no search: setup.sh may install what the search would look for, so they start a second make.

run:
	@./setup.sh run
	@$(MAKE) --no-print-directory start

test:
	@./setup.sh test
	@$(MAKE) --no-print-directory all tests
	@test/run

soak: all
	@test/soak.sh $(or $(MINUTES),30)

clean:
	rm -rf build train bench

sources := $(wildcard *.cu attention/*.cu fsdp/*.cu model/*.cu lib/*/*.cu lib/*/*.cc)
test_mains := test/main.cc test/alone.cc test/ranks.cc
test_sources := $(test_mains) test/training.cc test/fuzz/targets.cc $(wildcard test/test_*.cc test/test_*.cu)

format:
	clang-format -i $(sources) $(wildcard *.h fsdp/*.h model/*.h attention/*.h attention/*.cuh lib/*/*.h lib/*/*.cuh cpu/*.h test/*.h test/*.cc test/*.cu test/fuzz/*.h test/fuzz/*.cc)

ifneq ($(filter-out run test clean format help,$(or $(MAKECMDGOALS),all)),)

# ------------------------------------------------------------------------------- search: compiler, MPI, libraries, GPUs
# probe.sh finds them, here and for setup.sh, and writes found_NAME=value.
quote = '$(subst ','\'',$(1))'
probed := $(shell export TMPDIR=$(call quote,$(tmpdir)) CXX=$(call quote,$(CXX)) MPICXX=$(call quote,$(MPICXX)) \
  CPPFLAGS=$(call quote,$(CPPFLAGS)) CXXFLAGS=$(call quote,$(CXXFLAGS)) LDFLAGS=$(call quote,$(LDFLAGS)) \
  LDLIBS=$(call quote,$(LDLIBS)); ./probe.sh && echo yes)
ifeq ($(probed),)
  $(error nothing was built)
endif
include build/found

# --------------------------------------------------------------------------------------------------------- search: CUDA
# Other tools use this name in the environment too (x86_64): only what can be a GPU's is taken from there.
ifeq ($(origin ARCH),environment)
  ARCH := $(shell echo '$(ARCH)' | grep -E '^(sm_)?[0-9]+a?( |$$)')
endif
asked_cuda := $(if $(filter 1,$(SAN)),0,$(CUDA))
ifneq ($(asked_cuda),0)
  nvcc := $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
endif
ifneq ($(nvcc),)
  override CUDA := 1
  # nvcc may be a wrapper or a link (/usr/bin/nvcc): --dryrun tells where its toolkit lies. Distributions that put CUDA
  # under /usr name no TOP; the compiler then finds headers and libraries by itself.
  cuda_top := $(shell echo | $(nvcc) -x cu --dryrun - 2>&1 | sed -n 's/^$(hash)$$ TOP=//p')
  cuda_home := $(realpath $(or $(cuda_top),$(dir $(realpath $(nvcc)))..))
  cuda_version := $(shell $(nvcc) --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
  cuda_include := $(filter-out /usr/include,$(wildcard $(cuda_home)/include $(cuda_home)/targets/x86_64-linux/include))
  cuda_lib := $(firstword $(wildcard $(cuda_home)/lib64 $(cuda_home)/targets/x86_64-linux/lib $(cuda_home)/lib))
  # Hopper's own instructions need the target 90a. bf16 arithmetic needs 8.0; older chips are left to the CPU backend.
  ifeq ($(ARCH),)
    ARCH := $(patsubst 90,90a,$(found_gpu_caps))
    ARCH := $(foreach a,$(ARCH),$(if $(shell $(nvcc) --list-gpu-code | grep -w sm_$(a:90a=90)),$(a)))
    ifeq ($(ARCH),)
      ARCH := 80 90a
      gencode := -gencode=arch=compute_80,code=compute_80
    endif
  endif
  archs := $(patsubst sm_%,%,$(ARCH))
  gencode += $(foreach a,$(archs),-gencode=arch=compute_$(a),code=sm_$(a))
  arch_text := $(addprefix sm_,$(archs))
else
  ifeq ($(asked_cuda),1)
    $(error CUDA=1, but there is no nvcc in CUDA_HOME, PATH or /usr/local/cuda)
  endif
  override CUDA := 0
endif

# --------------------------------------------------------------------------------------------------------- search: NCCL
# Beside CUDA, where the linker looks, or inside Python's package. libnccl.so.2 is named in full: the Python package has
# no libnccl.so.
ifeq ($(CUDA)$(filter 0,$(NCCL)),1)
  find_nccl = for d in $(1); do for l in lib lib64 lib/x86_64-linux-gnu targets/x86_64-linux/lib; do \
    if [ -e $$d/include/nccl.h ] && [ -e $$d/$$l/libnccl.so.2 ]; then echo $$d/include $$d/$$l/libnccl.so.2; exit; fi; done; done
  ifneq ($(NCCL_HOME),)
    nccl := $(shell $(call find_nccl,$(NCCL_HOME)))
  else
    nccl := $(shell $(call find_nccl,$(cuda_home) /usr /usr/local))
    ifeq ($(nccl),)
      nccl := $(shell l=$$(ldconfig -p 2>/dev/null | sed -n 's/.*libnccl\.so\.2 .*=> //p' | head -1); \
        h=$$(for i in $(cuda_include) /usr/include /usr/local/include; do [ -e $$i/nccl.h ] && echo $$i && break; done); \
        [ -n "$$l" ] && [ -n "$$h" ] && echo $$h $$l)
    endif
    ifeq ($(nccl),)
      nccl := $(shell for p in python3 python; do d=$$($$p -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' \
        2>/dev/null) && $(call find_nccl,$$d); done | head -1)
    endif
  endif
endif
nccl_include := $(word 1,$(nccl))
nccl_lib := $(word 2,$(nccl))
override NCCL := $(if $(nccl),1,0)
nccl_version := $(if $(nccl),$(shell awk '/define NCCL_(MAJOR|MINOR|PATCH) /{v = v (v ? "." : "") $$3} END {print v}' \
  $(nccl_include)/nccl.h))

# -------------------------------------------------------------------------------------------------------- search: CUPTI
# Its headers lie beside CUDA's or apart. Its library is opened by the programs when they want it; where they look for it
# is written into them.
ifeq ($(CUDA)$(filter 0,$(CUPTI)),1)
  cupti_include := $(firstword $(foreach d,$(cuda_include) /usr/include $(cuda_home)/extras/CUPTI/include,$(if \
    $(wildcard $(d)/cupti.h),$(d))))
  cupti_lib := $(firstword $(foreach d,$(cuda_lib) $(cuda_home)/extras/CUPTI/lib64 $(cuda_home)/extras/CUPTI/lib,$(if \
    $(wildcard $(d)/libcupti.so*),$(d))))
endif
override CUPTI := $(if $(cupti_include),1,0)

wants_tests := $(filter tests faults build/test_%,$(MAKECMDGOALS))
missing := $(strip $(found_missing) $(if $(wants_tests),$(found_missing_tests)))

# ---------------------------------------------------------------------------------------------------------- the table
row = $(info $(shell printf '  %-11s %s' '$(1)' '$(2)'))
ifeq ($(MAKE_TOLD),)
  $(info found)
  $(call row,C++,$(if $(found_cxx),$(found_cxx) -march=$(CPU_ARCH),not found))
  $(call row,CUDA,$(if $(nvcc),$(cuda_version) ($(or $(cuda_home),$(nvcc))),$(if \
    $(asked_cuda),off,no nvcc found)))
  ifneq ($(nvcc),)
    $(call row,GPU,$(or $(found_gpu_name),none here))
    $(call row,NCCL,$(if $(nccl),$(nccl_version) ($(nccl_lib)),not found: collectives go over MPI))
  endif
  ifneq ($(nvcc),)
    $(call row,CUPTI,$(if $(cupti_include),$(cupti_include)/cupti.h ($(or $(cupti_lib),no library here)),not found: --profile \
      and --trace show no kernels))
  endif
  $(call row,MPI,$(if $(found_mpi),$(or $(found_mpi_mismatch),$(found_mpirun_version),no mpirun),not found))
  $(call row,OpenBLAS,$(or $(found_openblas),not found$(if $(found_openblas_note), ($(found_openblas_note)))))
  $(call row,CLI11,$(or $(found_cli11),not found))
  $(call row,json,$(or $(found_json),not found))
  $(call row,xxHash,$(or $(found_xxhash),not found))
  $(call row,protozero,$(or $(found_protozero),not found))
  $(call row,Catch2,$(or $(found_catch2),not found))
  $(info building)
  $(call row,backends,CPU$(if $(nvcc), and GPU ($(arch_text)$(if $(findstring code=compute_80,$(gencode)), and PTX))))
  $(call row,collectives,MPI$(if $(nccl), and NCCL))
  $(info )
  export MAKE_TOLD := 1
endif
ifneq ($(missing),)
  $(error missing: $(missing). `make run` and `make test` install them, or, as root: apt-get install -y $(missing))
endif

# ------------------------------------------------------------------------------------------------------------- flags
defines := -DFSDP_CUDA=$(CUDA) -DFSDP_NCCL=$(NCCL) -DFSDP_CUPTI=$(CUPTI)
# System directories: their headers owe us no clean warnings. nvcc adds its own toolkit's.
includes := -I. $(CPPFLAGS) $(found_mpi_flags) $(found_openblas_flags) $(addprefix -isystem ,$(filter-out /usr/include \
  /usr/local/include $(cuda_include),$(nccl_include) $(cupti_include)))
debug := $(if $(filter 1,$(DEBUG)),-g)
sanitize := $(if $(filter 1,$(SAN)),-g -fno-omit-frame-pointer -fsanitize=address$(comma)undefined -fno-sanitize-recover=undefined)
# What is not hot is compiled with -O1: -O3 took half of the compiler's time. The CPU's kernels and random numbers are
# inline, and the linker keeps any one copy: all must round alike, so files that include them stay at -O3.
hot_headers := (cpu/|lib/ops/philox|test/nsa.h)
cold := $(shell grep -LE '"$(hot_headers)' train.cu bench.cu $(wildcard lib/program/*.cc test/*.cc test/fuzz/*.cc))
level = $(if $(sanitize)$(filter $(cold) build/json.h,$<),-O1,-O3)
# Files that name json include lib/program/json.h, precompiled, before all others.
with_json := $(shell grep -lw json $(cold))
precompiled = $(if $(filter $(with_json),$<),-include build/json.h)
host_flags := -march=$(CPU_ARCH) -Wall -Wextra $(debug) $(sanitize) $(CXXFLAGS)
cxx_compile = $(CXX) -std=c++17 $(level) $(host_flags) -pthread $(defines) $(includes) $(addprefix -isystem ,$(cuda_include))
nvcc_compile := $(nvcc) -ccbin $(CXX) -std=c++17 -O3 $(gencode) -t $(words $(archs)) --expt-relaxed-constexpr \
  $(foreach f,$(host_flags),-Xcompiler=$(subst $(comma),\$(comma),$(f))) $(if $(debug),-lineinfo) $(defines) $(includes) $(NVCCFLAGS)
# A directory that the run-time linker does not search is written into the programs.
system_dirs := /usr/lib /lib /usr/lib64 /lib64 /usr/lib/x86_64-linux-gnu /lib/x86_64-linux-gnu
rpath = $(foreach d,$(filter-out $(system_dirs),$(1)),-Wl,-rpath,$(d))
# A build without it fails here; the programs load it on first use (lib/ops/cublaslt.cc).
cublas := -Wl,--push-state,--as-needed -lcublasLt -Wl,--pop-state
link_libs := $(sanitize) $(if $(nvcc),$(addprefix -L,$(cuda_lib)) $(call rpath,$(cuda_lib)) $(cublas) -lcudart_static -lrt) -ldl \
  $(call rpath,$(filter-out $(cuda_lib),$(cupti_lib))) \
  $(if $(nccl),$(nccl_lib) $(call rpath,$(patsubst %/,%,$(dir $(nccl_lib))))) $(found_mpi_libs) $(found_openblas_libs) -lpthread

# ------------------------------------------------------------------------------------------------------------- build
objects := $(addprefix build/,$(addsuffix .o,$(basename $(sources))))
parts := $(filter-out build/train.o build/bench.o,$(objects))
rank_tests := test/training.cc $(foreach name,comm faults fsdp model fp8_training reduce checkpoint diagnostics evaluation init,\
  test/test_$(name).cc)
unit_objects := $(patsubst %,build/%.o,$(basename $(filter-out $(test_mains) $(rank_tests),$(test_sources))))
rank_objects := $(patsubst %,build/%.o,$(basename $(filter $(rank_tests),$(test_sources))))

all: train bench
tests: build/test_unit $(if $(rank_objects),build/test_ranks)

train: build/train.o $(parts)
bench: build/bench.o $(parts)
build/test_unit: build/test/main.o build/test/alone.o $(unit_objects) $(parts)
build/test_ranks: build/test/main.o build/test/ranks.o $(rank_objects) $(parts)

train bench build/test_unit build/test_ranks:
	@echo link $@
	@$(CXX) $(debug) -Wl,--build-id=sha1 -o $@ $(filter %.o,$^) $(LDFLAGS) $(if $(filter build/test_%,$@),$(found_catch2_libs)) $(link_libs) $(LDLIBS)

$(patsubst %,build/%.o,$(basename $(with_json))): build/json.h.gch
build/json.h:
	@mkdir -p build && echo '#include "lib/program/json.h"' > $@
build/json.h.gch: build/json.h lib/program/json.h build/flags
	@echo compile lib/program/json.h && $(cxx_compile) -x c++-header -o $@ $<

build/%.o: %.cc build/flags | build/version.h
	@mkdir -p $(@D) && echo compile $<
	@$(cxx_compile) $(precompiled) -MMD -MP -c -o $@ $<

# A .cu without a kernel is C++, which nvcc would read three times.
kernels := attention/% lib/comm/peers.cu lib/comm/progress.cu lib/device/stream.cu lib/ops/matmul.cu lib/ops/ops.cu
build/%.o: %.cu build/flags | build/version.h
	@mkdir -p $(@D) && echo compile $<
	@$(if $(and $(nvcc),$(filter $(kernels),$<)),$(nvcc_compile) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<,$(cxx_compile) $(precompiled) -MMD -MP -c -o $@ -x c++ $<)

# The second half of `make run`: trains, and says what was done and what to type next.
start: train
	@ranks=$$(./setup.sh ranks $(CUDA)) && . ./setup.sh env $$ranks && \
	  export OMPI_MCA_odls_base_sigkill_timeout=$${OMPI_MCA_odls_base_sigkill_timeout-10} && \
	  run="mpirun $${MPIRUN_FLAGS:+$$MPIRUN_FLAGS }-np $$ranks ./train" && \
	  (set -x; $$run --seq 4096 $(ARGS)) && printf '%s\n' '' \
	  "done: built ./train and trained with $$ranks rank$$([ $$ranks = 1 ] || echo s) on $(if $(nvcc),$(or $(found_gpu_name),the CPU (no GPU here)),the CPU)" \
	  'next: make run RANKS=2 ARGS="--dim 256 --steps 50"   other ranks, a wider model; ./train --help lists every option' \
	  "      $$run   the same by hand; make test runs every test"

faults: train tests
	@test/faults.sh

# Everything under results/ is made here, and the texts' tables and pictures from that. PyTorch stands beside where it
# is installed; the plan's trace, which needs no GPU, is the one that the pictures of slots and memory are drawn from.
tables: all $(if $(ONLY),,tests)
	./bench --sweep $(or $(ONLY),all) --peer $(if $(GPUS),--ranks $(GPUS)) $(if $(CONTINUE),--continue)
	./train --plan --world 4 --gpu h200 --preset rope --attn dense --trace results/trace-plan.json > build/plan.log
	$(if $(ONLY),,test/run '[gpu]' > results/gpu-tests.log)
	@$(MAKE) --no-print-directory notes
notes: train bench
	./bench --plots
	./bench --notes NOTES.md README.md results/README.md

# libFuzzer, which is clang's, makes inputs up for each parser; SECONDS for each. What it finds lands in build/fuzz.
fuzz_names = $(notdir $(wildcard test/fuzz/corpus/*))
fuzz_objects := $(patsubst %,build/fuzz/%.o,$(basename test/fuzz/main.cc test/fuzz/targets.cc $(filter-out train.cu bench.cu,$(sources))))
fuzz_compile = clang++ -std=c++17 -O1 -g -fsanitize=fuzzer-no-link$(comma)address$(comma)undefined \
  -fno-sanitize-recover=undefined -pthread -DFSDP_CUDA=0 -DFSDP_NCCL=0 -DFSDP_CUPTI=0 $(includes) -MMD -MP -c -o $@
fuzz: build/fuzz/run
	@for name in $(fuzz_names); do mkdir -p build/fuzz/$$name && echo "fuzz $$name" && \
	  ASAN_OPTIONS=detect_leaks=0 FUZZ=$$name build/fuzz/run -max_total_time=$(or $(SECONDS),60) -rss_limit_mb=2048 \
	  -timeout=10 -print_final_stats=1 -artifact_prefix=build/fuzz/$$name- build/fuzz/$$name test/fuzz/corpus/$$name \
	  2>&1 | tee build/fuzz/$$name.log | grep -E 'ERROR|SUMMARY|stat::number_of_executed|Test unit written' ; \
	  [ "$${PIPESTATUS[0]}" = 0 ] || exit 1; done
build/fuzz/run: $(fuzz_objects)
	@echo link $@ && clang++ -fsanitize=fuzzer,address,undefined -o $@ $^ $(LDFLAGS) $(found_mpi_libs) $(found_openblas_libs) -ldl -lpthread $(LDLIBS)
build/fuzz/%.o: %.cc build/flags | build/version.h
	@mkdir -p $(@D) && echo compile $< with libFuzzer && $(fuzz_compile) $<
build/fuzz/%.o: %.cu build/flags | build/version.h
	@mkdir -p $(@D) && echo compile $< with libFuzzer && $(fuzz_compile) -x c++ $<

# What is built without CUDA and NCCL must compile, on machines that have both too. Nothing is kept of it. A file that
# asks for neither is parsed, and not compiled: what is defined in it and not used, it does not use with CUDA either. One
# that names nothing of theirs is as it is with them: what headers have for GPUs alone is in namespace gpu, in a .cuh, or
# has CUDA's name in its own.
syntax: | build/version.h
	@names='FSDP_(CUDA|NCCL|CUPTI)'; of_gpus='gpu::|\.cuh"|[cC][uU][dD][aA]|cublas|cupti|nccl[A-Z]'; \
	  { grep -lE "$$names" $(sources) $(test_sources) | sed 's|^|-S -o /dev/null |'; \
	  grep -LE "$$names" $(sources) $(test_sources) | xargs grep -lE "$$of_gpus" | sed 's|^|-fsyntax-only |'; } | \
	  xargs -P $(cores) -L 1 $(CXX) -std=c++17 -O0 \
	  -Wall -Wextra -pthread -UFSDP_CUDA -DFSDP_CUDA=0 -DFSDP_NCCL=0 $(includes) -x c++

# Both files change only when their content does, so that what hangs on them is rebuilt when it must be.
write_if_changed = mkdir -p build && printf '%s\n' '$(1)' | cmp -s - $@ || printf '%s\n' '$(1)' > $@
build/flags: force
	@$(call write_if_changed,$(cxx_compile) $(nvcc_compile) $(link_libs))
build/version.h: force
	@commit=$${COMMIT:-$$(git describe --always --dirty 2>/dev/null || echo unknown)}; \
	$(call write_if_changed,#define FSDP_COMMIT "'$$commit'")

# A source that has moved since the last build: what was made of it finds its new one.
%.cu: ;
%.cc: ;

-include $(objects:.o=.d) $(fuzz_objects:.o=.d) $(unit_objects:.o=.d) $(rank_objects:.o=.d) build/test/main.d
endif

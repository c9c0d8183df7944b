# fsdp.cu: `make run` trains, `make test` tests; both install what is missing. `make help` lists the rest.
#
# Nothing has to be configured: the first half of this file looks for CUDA, NCCL, MPI and the header libraries and says
# in a table what it found, the second half builds. What can be set, on the command line or in the environment:
#   CUDA=0          build the CPU backend alone (by itself where there is no nvcc)
#   NCCL=0          leave NCCL out: collectives then go over MPI through host memory
#   ARCH="90a 80"   GPU architectures (by itself: this machine's GPUs; without a GPU 8.0 and 9.0a)
#   CUDA_HOME, NCCL_HOME, MPICXX, CXX, CPU_ARCH, CPPFLAGS, CXXFLAGS, NVCCFLAGS, LDFLAGS, LDLIBS; DEBUG=1 adds -g -lineinfo
#   COMMIT          what --version and results say, for a source tree without git
#   RANKS, ARGS     for `make run`: how many ranks, more options of ./train

SHELL := /bin/bash
CPU_ARCH ?= native
RANKS ?= 4
ARGS ?=

.DEFAULT_GOAL := all
.PHONY: all run test tests syntax clean format help force
.DELETE_ON_ERROR:
.SUFFIXES:

hash := \#
cores := $(shell nproc 2>/dev/null || echo 2)
ifeq ($(filter -j%,$(MAKEFLAGS)),)
  ifeq ($(MAKELEVEL),0)
    MAKEFLAGS += -j$(cores)
  endif
endif

help:
	@printf '%s\n' \
	  'make             build ./train and ./bench' \
	  'make run         install what is missing, build, train with 4 ranks (RANKS=, ARGS="--dim 256 ...")' \
	  'make test        install what is missing, build, run every test' \
	  'make tests       build the tests: build/test_unit, build/test_ranks' \
	  'make format      clang-format every source' \
	  'make clean       remove what was built' \
	  'CUDA=0           the CPU backend alone; NCCL=0, ARCH="90a 80", CPU_ARCH=x86-64-v3, DEBUG=1: see the Makefile'

# ---------------------------------------------------------------------------------------------------- run and test
# The first two need no search: setup.sh may install what the search would look for, so they start a second make.

run:
	@./setup.sh run
	@$(MAKE) --no-print-directory train
	@. ./setup.sh env $(RANKS) && set -x && mpirun $$MPIRUN_FLAGS -np $(RANKS) ./train --seq 4096 $(ARGS)

test:
	@./setup.sh test
	@$(MAKE) --no-print-directory all tests
	@test/run

clean:
	rm -rf build train bench

sources := $(wildcard *.cu attention/*.cu lib/*/*.cu lib/*/*.cc)
test_sources := test/main.cc $(wildcard test/test_*.cc test/test_*.cu)

format:
	clang-format -i $(sources) $(wildcard *.h attention/*.cuh lib/*/*.h lib/*/*.cuh cpu/*.h test/*.h test/*.cc test/*.cu)

ifneq ($(filter-out run test clean format help,$(or $(MAKECMDGOALS),all)),)

# ---------------------------------------------------------------------------------------------- what there is: CUDA
# Other tools use this name in the environment too (x86_64): only what can be a GPU's is taken from there.
ifeq ($(origin ARCH),environment)
  ARCH := $(shell echo '$(ARCH)' | grep -E '^(sm_)?[0-9]+a?( |$$)')
endif
asked_cuda := $(CUDA)
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
  gpu_name := $(shell nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sort | uniq -c | \
    sed 's/^ *\([0-9]*\) /\1 x /' | paste -sd, | grep -v -i fail)
  # Hopper's own instructions need the target 90a. bf16 arithmetic needs 8.0; older chips are left to the CPU backend.
  ifeq ($(ARCH),)
    ARCH := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.[0-9]$$' | \
      sort -u | tr -d . | awk '$$1 >= 80 { print $$1 == 90 ? "90a" : $$1 }')
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

# ---------------------------------------------------------------------------------------------- what there is: NCCL
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

# ----------------------------------------------------------------------------------- what there is: MPI, header libraries
MPICXX ?= mpicxx
# Open MPI, else MPICH and its kin; without a compiler wrapper the flags of the usual place.
mpi_compile := $(or $(shell $(MPICXX) --showme:compile 2>/dev/null),$(shell $(MPICXX) -compile_info 2>/dev/null))
mpi_link := $(or $(shell $(MPICXX) --showme:link 2>/dev/null),$(shell $(MPICXX) -link_info 2>/dev/null),-lmpi)
mpi_include := $(patsubst -I%,%,$(filter -I%,$(mpi_compile)))
mpi_libs := $(filter-out -lmpi_cxx,$(filter -L% -l% -Wl%,$(mpi_link)))
mpi_version := $(or $(shell mpirun --version 2>/dev/null | sed -n '1s/^mpirun (\(.*\))/\1/p;/HYDRA/{s/.*/MPICH/p;q}'),no mpirun)

# One run of the preprocessor sees which headers there are.
openblas_include := $(patsubst -I%,%,$(filter -I%,$(shell pkg-config --cflags openblas 2>/dev/null)))
openblas_lib := $(or $(shell pkg-config --libs openblas 2>/dev/null),-lopenblas)
found := $(shell printf '$(hash)if __has_include(<%s>)\n%s\n$(hash)endif\n' mpi.h has_mpi CLI/CLI.hpp has_cli11 \
  nlohmann/json.hpp has_json cblas.h has_openblas catch2/catch_all.hpp has_catch2_v3 catch2/catch.hpp has_catch2_v2 | \
  $(CXX) $(CPPFLAGS) $(addprefix -isystem ,$(mpi_include) $(openblas_include)) -std=c++17 -E -P -x c++ - 2>/dev/null)
catch := $(firstword $(filter has_catch2_v%,$(found)))
wants_tests := $(filter tests build/test_%,$(MAKECMDGOALS))
missing := $(if $(shell command -v $(CXX)),,$(CXX)) $(if $(filter has_mpi,$(found)),,libopenmpi-dev) $(if $(filter has_cli11,$(found)),,libcli11-dev) \
  $(if $(filter has_json,$(found)),,nlohmann-json3-dev) $(if $(filter has_openblas,$(found)),,libopenblas-dev) \
  $(if $(or $(catch),$(if $(wants_tests),,no)),,catch2)

# ---------------------------------------------------------------------------------------------------------- the table
host_version := $(notdir $(CXX)) $(shell $(CXX) -dumpfullversion -dumpversion 2>/dev/null)
row = $(info $(shell printf '  %-11s %s' '$(1)' '$(2)'))
ifeq ($(MAKE_TOLD),)
  $(info found)
  $(call row,C++,$(host_version) -march=$(CPU_ARCH))
  $(call row,CUDA,$(if $(nvcc),$(cuda_version) ($(or $(cuda_home),$(nvcc))),$(if \
    $(asked_cuda),off,no nvcc found)))
  ifneq ($(nvcc),)
    $(call row,GPU,$(or $(gpu_name),none here))
    $(call row,NCCL,$(if $(nccl),$(nccl_version) ($(nccl_lib)),not found: collectives go over MPI))
  endif
  $(call row,MPI,$(if $(filter has_mpi,$(found)),$(mpi_version),not found))
  $(call row,OpenBLAS,$(if $(filter has_openblas,$(found)),yes,not found))
  $(call row,CLI11,$(if $(filter has_cli11,$(found)),yes,not found))
  $(call row,json,$(if $(filter has_json,$(found)),yes,not found))
  $(call row,Catch2,$(if $(catch),$(catch:has_catch2_%=%),not found))
  $(info building)
  $(call row,backends,CPU$(if $(nvcc), and GPU ($(arch_text)$(if $(findstring code=compute_80,$(gencode)), and PTX))))
  $(call row,collectives,MPI$(if $(nccl), and NCCL))
  $(info )
  export MAKE_TOLD := 1
endif
ifneq ($(strip $(missing)),)
  $(error missing: $(strip $(missing)). `make run` and `make test` install them, or: apt-get install $(strip $(missing)))
endif

# ------------------------------------------------------------------------------------------------------------- flags
defines := -DFSDP_CUDA=$(CUDA) -DFSDP_NCCL=$(NCCL) -DOMPI_SKIP_MPICXX
# System directories: their headers owe us no clean warnings. nvcc adds its own toolkit's.
includes := -I. $(CPPFLAGS) $(addprefix -isystem ,$(mpi_include) $(openblas_include) $(filter-out /usr/include \
  /usr/local/include,$(nccl_include)))
debug := $(if $(filter 1,$(DEBUG)),-g)
host_flags := -O3 -march=$(CPU_ARCH) -Wall -Wextra $(debug) $(CXXFLAGS)
comma := ,
cxx_compile := $(CXX) -std=c++17 $(host_flags) -pthread $(defines) $(includes) $(addprefix -isystem ,$(cuda_include))
nvcc_compile := $(nvcc) -ccbin $(CXX) -std=c++17 -O3 $(gencode) -t $(words $(archs)) --expt-relaxed-constexpr \
  $(foreach f,$(filter-out -O3,$(host_flags)),-Xcompiler=$(subst $(comma),\$(comma),$(f))) $(if $(debug),-lineinfo) $(defines) $(includes) $(NVCCFLAGS)
# A directory that the run-time linker does not search is written into the programs.
system_dirs := /usr/lib /lib /usr/lib64 /lib64 /usr/lib/x86_64-linux-gnu /lib/x86_64-linux-gnu
rpath = $(foreach d,$(filter-out $(system_dirs),$(1)),-Wl,-rpath,$(d))
link_libs := $(if $(nvcc),$(addprefix -L,$(cuda_lib)) $(call rpath,$(cuda_lib)) -lcublasLt -lcudart_static -ldl -lrt) \
  $(if $(nccl),$(nccl_lib) $(call rpath,$(patsubst %/,%,$(dir $(nccl_lib))))) $(mpi_libs) $(openblas_lib) -lpthread

# ------------------------------------------------------------------------------------------------------------- build
objects := $(addprefix build/,$(addsuffix .o,$(basename $(sources))))
parts := $(filter-out build/train.o build/bench.o,$(objects))
rank_tests := test/test_comm.cc test/test_fsdp.cc test/test_checkpoint.cc
unit_objects := $(patsubst %,build/%.o,$(basename $(filter-out test/main.cc $(rank_tests),$(test_sources))))
rank_objects := $(patsubst %,build/%.o,$(basename $(filter $(rank_tests),$(test_sources))))

all: train bench
tests: build/test_unit $(if $(rank_objects),build/test_ranks)

train: build/train.o $(parts)
bench: build/bench.o $(parts)
build/test_unit: build/test/main.o $(unit_objects) $(parts)
build/test_ranks: build/test/main_mpi.o $(rank_objects) $(parts)
catch_lib := $(if $(filter has_catch2_v3,$(catch)),-lCatch2)

train bench build/test_unit build/test_ranks:
	@echo link $@
	@$(CXX) $(debug) -o $@ $(filter %.o,$^) $(LDFLAGS) $(if $(filter build/test_%,$@),$(catch_lib)) $(link_libs) $(LDLIBS)

build/test/main_mpi.o: test/main.cc build/flags | build/version.h
	@mkdir -p $(@D) && echo compile $< with MPI
	@$(cxx_compile) -DTEST_MPI -MMD -MP -c -o $@ $<

build/%.o: %.cc build/flags | build/version.h
	@mkdir -p $(@D) && echo compile $<
	@$(cxx_compile) -MMD -MP -c -o $@ $<

build/%.o: %.cu build/flags | build/version.h
	@mkdir -p $(@D) && echo compile $<
	@$(if $(nvcc),$(nvcc_compile) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<,$(cxx_compile) -MMD -MP -c -o $@ -x c++ $<)

# What is built without CUDA and NCCL must compile, on machines that have both too. Nothing is kept of it.
syntax: | build/version.h
	@printf '%s\n' $(sources) $(test_sources) | xargs -P $(cores) -I {} $(CXX) -std=c++17 -O0 -S -o /dev/null -Wall -Wextra -pthread -UFSDP_CUDA \
	  -DFSDP_CUDA=0 -DFSDP_NCCL=0 -DOMPI_SKIP_MPICXX $(includes) -x c++ {}

# Both files change only when their content does, so that what hangs on them is rebuilt when it must be.
write_if_changed = mkdir -p build && printf '%s\n' '$(1)' | cmp -s - $@ || printf '%s\n' '$(1)' > $@
build/flags: force
	@$(call write_if_changed,$(cxx_compile) $(nvcc_compile) $(link_libs))
build/version.h: force
	@commit=$${COMMIT:-$$(git describe --always --dirty 2>/dev/null || echo unknown)}; \
	$(call write_if_changed,#define FSDP_COMMIT "'$$commit'")

-include $(objects:.o=.d) $(unit_objects:.o=.d) $(rank_objects:.o=.d) build/test/main.d build/test/main_mpi.d
endif

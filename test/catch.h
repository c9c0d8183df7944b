// What every test file includes: Catch2 (version 2 or 3), the devices at hand, and a way to skip that is counted.
//
// Test files named in the Makefile as rank_tests are linked into build/test_ranks and run under mpirun at several world
// sizes; MPI is initialised before they start. All others are linked into build/test_unit, which knows no MPI.
// A test case counts once: failed if it failed on any rank, else skipped if it was skipped on any, else passed.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

#include "lib/comm/comm.h"
#include "lib/device/device.h"

inline int gpus() { return gpu_count(); }
inline bool have_gpu() { return gpus() > 0; }

// Who we are among the ranks; one rank in build/test_unit, which starts no MPI.
const World& test_world();

// Whether NCCL can connect the ranks: it wants a GPU for each rank of a host.
bool one_gpu_a_rank();

// This process's device of that kind, in Mode::run; made at first use and kept. GPU: number local rank mod gpus().
Device& test_device(Backend backend);
inline int ordinal_of(Backend backend) { return backend == Backend::gpu ? test_device(backend).ordinal : 0; }

void skip_test(const char* why);
// Leaves the test case, which is printed with the reason. In a multi-rank test every rank must come to the same
// decision.
#define SKIP_TEST(why) \
  do {                 \
    skip_test(why);    \
    return;            \
  } while (0)
// The same, of a test case that needs a GPU.
#define NEEDS_GPU() \
  if (!have_gpu()) SKIP_TEST("no GPU")
// Of one that needs a GPU for each rank, which all are of one host; and of one that needs several such ranks.
#define NEEDS_GPUS_OF_ONE_HOST()                                          \
  NEEDS_GPU();                                                            \
  if (!one_gpu_a_rank() || !on_one_host(test_world(), test_world().size)) \
  SKIP_TEST("fewer GPUs than ranks, or several hosts")
#define NEEDS_PEERS()       \
  NEEDS_GPUS_OF_ONE_HOST(); \
  if (test_world().size == 1) SKIP_TEST("one rank has no peers")

// For lib/comm alone: MPI's calls, checked, and waiting for them.
#pragma once

#define OMPI_SKIP_MPICXX 1  // the C++ bindings, long gone from MPI, do not compile cleanly
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

void check_mpi(int code, const char* call, const char* file, int line);  // throws MpiError
#define MPI_CHECK(call) check_mpi((call), #call, __FILE__, __LINE__)

// Waits without burning the core that another rank computes on.
void finish(MPI_Request* request);

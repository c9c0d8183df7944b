// Functions of the CUDA driver by their names: the runtime is linked into the program, the driver is not, so that the
// program starts where there is none.
//
//   CUresult (*name_of)(const char**, CUfunction) = nullptr;
//   if (driver_function("cuFuncGetName", 12030, &name_of)) name_of(&name, function);
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "lib/device/error.h"

// Of the driver's interface as CUDA `version` knows it (12030: 12.3). False where the driver is older.
template <class F>
bool driver_function(const char* name, int version, F** function) {
  void* p = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &p, unsigned(version), cudaEnableDefault, &found));
#else
  (void)version;
  CUDA_CHECK(cudaGetDriverEntryPoint(name, &p, cudaEnableDefault, &found));
#endif
  *function = reinterpret_cast<F*>(p);
  return found == cudaDriverEntryPointSuccess;
}

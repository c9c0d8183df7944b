// cuBLASLt, loaded when a GPU's first product is made. Were it linked, every process would load it and initialize its
// tables of kernels, 0.17 s and 205 MiB: ./train --help, and each rank on a CPU (results/gpu-tests-2026-11-29.log).
#pragma once

#include <string>

#if FSDP_CUDA
#include <cublasLt.h>

// What is called here. Shapes, units and errors: cuBLAS's documentation of cublasLt functions of these names.
struct CublasLt {
  decltype(&::cublasLtCreate) create;
  decltype(&::cublasLtGetStatusName) status_name;
  decltype(&::cublasLtGetVersion) version;
  decltype(&::cublasLtMatmul) matmul;
  decltype(&::cublasLtMatmulAlgoConfigGetAttribute) get_algo;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&::cublasLtMatmulDescCreate) create_desc;
  decltype(&::cublasLtMatmulDescSetAttribute) set_desc;
  decltype(&::cublasLtMatmulPreferenceCreate) create_preference;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) set_preference;
  decltype(&::cublasLtMatmulPreferenceDestroy) destroy_preference;
  decltype(&::cublasLtMatrixLayoutCreate) create_layout;
};

// For the life of the process. Error: the library cannot be loaded, and why.
const CublasLt& cublaslt();
#endif

// Of the library, which is loaded for it, as in 13.2.0. Empty: it cannot be.
std::string cublaslt_version();

#include "lib/ops/cublaslt.h"

#include "lib/device/error.h"

#if FSDP_CUDA
#include <dlfcn.h>

#include <type_traits>

// Null, and why: it cannot be opened.
static const CublasLt* open_library(std::string* why) {
  static std::string reason;
  static const CublasLt* const opened = []() -> const CublasLt* {
    const std::string file = strf("libcublasLt.so.%d", CUBLAS_VER_MAJOR);
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      const char* said = dlerror();
      reason = said ? said : file + " cannot be opened";
      return nullptr;
    }
    static CublasLt lt;
    auto find = [&](const char* name, auto* function) {
      *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(library, name));
      if (!*function && reason.empty()) reason = file + " has no " + name;
    };
    find("cublasLtCreate", &lt.create), find("cublasLtGetStatusName", &lt.status_name);
    find("cublasLtGetVersion", &lt.version), find("cublasLtMatmul", &lt.matmul);
    find("cublasLtMatmulAlgoConfigGetAttribute", &lt.get_algo);
    find("cublasLtMatmulAlgoGetHeuristic", &lt.heuristic);
    find("cublasLtMatmulDescCreate", &lt.create_desc), find("cublasLtMatmulDescSetAttribute", &lt.set_desc);
    find("cublasLtMatmulPreferenceCreate", &lt.create_preference);
    find("cublasLtMatmulPreferenceSetAttribute", &lt.set_preference);
    find("cublasLtMatmulPreferenceDestroy", &lt.destroy_preference);
    find("cublasLtMatrixLayoutCreate", &lt.create_layout);
    return reason.empty() ? &lt : nullptr;
  }();
  *why = reason;
  return opened;
}

const CublasLt& cublaslt() {
  static const CublasLt& opened = []() -> const CublasLt& {
    std::string why;
    if (const CublasLt* lt = open_library(&why)) return *lt;
    throw Error("matrix products on a GPU need cuBLAS: " + why +
                "; install CUDA's libraries, or name their directory in LD_LIBRARY_PATH");
  }();
  return opened;
}

std::string cublaslt_version() {
  std::string why;
  const CublasLt* lt = open_library(&why);
  if (!lt) return "";
  const size_t v = lt->version();
  return strf("%zu.%zu.%zu", v / 10000, v / 100 % 100, v % 100);
}
#else
std::string cublaslt_version() { return ""; }
#endif

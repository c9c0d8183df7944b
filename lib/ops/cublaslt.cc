#include "lib/ops/cublaslt.h"

#include "lib/device/error.h"
#include "lib/device/library.h"

#if FSDP_CUDA
namespace {
struct Loaded {
  CublasLt lt;
  std::string why;  // it cannot be used; empty: it can
};
const Loaded& loaded() {
  static const Loaded once = [] {
    Loaded l;
    Library library(strf("libcublasLt.so.%d", CUBLAS_VER_MAJOR));
    library.find("cublasLtCreate", &l.lt.create), library.find("cublasLtGetStatusName", &l.lt.status_name);
    library.find("cublasLtGetVersion", &l.lt.version), library.find("cublasLtMatmul", &l.lt.matmul);
    library.find("cublasLtMatmulAlgoConfigGetAttribute", &l.lt.get_algo);
    library.find("cublasLtMatmulAlgoGetHeuristic", &l.lt.heuristic);
    library.find("cublasLtMatmulDescCreate", &l.lt.create_desc);
    library.find("cublasLtMatmulDescSetAttribute", &l.lt.set_desc);
    library.find("cublasLtMatmulPreferenceCreate", &l.lt.create_preference);
    library.find("cublasLtMatmulPreferenceSetAttribute", &l.lt.set_preference);
    library.find("cublasLtMatmulPreferenceDestroy", &l.lt.destroy_preference);
    library.find("cublasLtMatrixLayoutCreate", &l.lt.create_layout);
    l.why = library.why();
    return l;
  }();
  return once;
}
}  // namespace

const CublasLt& cublaslt() {
  const Loaded& l = loaded();
  if (!l.why.empty())
    throw Error("matrix products on a GPU need cuBLAS: " + l.why +
                "; install CUDA's libraries, or name their directory in LD_LIBRARY_PATH");
  return l.lt;
}

std::string cublaslt_version() {
  if (!loaded().why.empty()) return "";
  const size_t v = loaded().lt.version();
  return strf("%zu.%zu.%zu", v / 10000, v / 100 % 100, v % 100);
}
#else
std::string cublaslt_version() { return ""; }
#endif

// Errors, and the texts they are made of. Nothing else: what reads options or data needs no device to say what is
// wrong.
//
//   REQUIRE_USER(rows > 0, "%s holds no row of %d tokens; lower --seq", path.c_str(), seq);  // UsageError: status 2
//   ASSERT(offset % 16 == 0);                       // Error: a broken promise inside the program
//   CUDA_CHECK(cudaEventRecord(event, stream));     // CudaError or OutOfMemory, with the call, file, line and rank
//   throw MpiError(strf("MPI: rank %d is gone", rank));
//
// Every error is one line: what, where, why, what to do.
#pragma once

#include <stdexcept>
#include <string>

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct UsageError : Error {  // the user's input is wrong: exit status 2
  using Error::Error;
};
struct CudaError : Error {
  using Error::Error;
};
struct CublasError : Error {
  using Error::Error;
};
struct NcclError : Error {
  using Error::Error;
};
struct MpiError : Error {
  using Error::Error;
};
struct OutOfMemory : Error {
  using Error::Error;
};

// A program's exit status: 2 where the user asked for what cannot be, 1 for any other error.
int exit_status(const std::exception& e);

int this_rank();  // for error texts; -1 before MPI has started
void set_this_rank(int rank);
std::string strf(const char* format, ...) __attribute__((format(printf, 1, 2)));  // printf into a string

#define REQUIRE_USER(cond, ...)                       \
  do {                                                \
    if (!(cond)) throw UsageError(strf(__VA_ARGS__)); \
  } while (0)
// A broken promise inside the program; never the user's fault.
#define ASSERT(cond)                                                                                        \
  do {                                                                                                      \
    if (!(cond)) throw Error(strf("internal error: %s does not hold at %s:%d", #cond, __FILE__, __LINE__)); \
  } while (0)

#if FSDP_CUDA
[[noreturn]] void throw_cuda(int code, const char* call, const char* file, int line);
#define CUDA_CHECK(call)                                                                   \
  do {                                                                                     \
    cudaError_t cuda_code_ = (call);                                                       \
    if (cuda_code_ != cudaSuccess) throw_cuda(int(cuda_code_), #call, __FILE__, __LINE__); \
  } while (0)
#define CUDA_CHECK_LAUNCH() CUDA_CHECK(cudaGetLastError())
#endif

// Every kernel, copy and clear of the GPU with its time, by CUPTI's activity API, where the toolkit has that and the
// machine the library. CUPTI is one for the process, and so is this.
//
//   std::string why;
//   if (!activity::open(&why)) note("no CUPTI: " + why);       // before CUDA graphs are made, or it does not see them
//   activity::start();
//   step();
//   dev.compute().synchronize();                               // and the other streams
//   for (const activity::Record& r : activity::stop()) ...
//
// The library is opened when somebody asks for it and not linked: a program that was built beside a toolkit starts, and
// trains, where there is only a driver. While nothing is recorded CUPTI costs nothing. Records are read by the layouts
// of CUDA 12.0, to which later versions have only added at the end.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

class Stream;

namespace activity {

struct Record {
  enum Kind { kernel, copy, clear };
  Kind kind = kernel;
  std::string name;     // of a kernel as short_name has it; "copy, host to device"; "clear"
  bool peer = false;    // a copy between GPUs
  uint32_t stream = 0;  // as stream_number counts
  int64_t bytes = 0;                  // of copies and clears
  uint64_t start_ns = 0, end_ns = 0;  // on the device, on now()'s clock
  uint64_t issued_ns = 0;             // when the host called what started it; 0: not known
};

// Whether there will be records. If not, `why` has half a sentence. Takes no GPU memory; may be called again.
bool open(std::string* why);
bool is_open();
// From here on. Throws CudaError, as stop does, with what CUPTI says.
void start();
// No more; those since start(), by their beginning. What is recorded has to have ended: synchronize first.
std::vector<Record> stop();

// CUPTI's clock where it is open, so that what the host does can stand beside the records; else the system's. ns.
uint64_t now();
// The number that the records of this stream have. Throws CudaError. Needs open().
uint32_t stream_number(const Stream& s);

// "void cast<float, bf16>(bf16*, float const*, long)", mangled or not, is "cast".
std::string short_name(const char* name);
// By its name: NCCL's kernels all have it in theirs.
bool is_nccl_kernel(const std::string& name);

}  // namespace activity

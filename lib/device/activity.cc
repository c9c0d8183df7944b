#include "lib/device/activity.h"

#include <cxxabi.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include "lib/device/error.h"
#include "lib/device/library.h"
#include "lib/device/stream.h"

#ifndef FSDP_CUPTI
#define FSDP_CUPTI 0
#endif
#if FSDP_CUPTI
#include <cuda_runtime_api.h>
#include <cupti.h>
#endif

namespace activity {

bool is_nccl_kernel(const std::string& name) { return name.find("nccl") != std::string::npos; }

std::string short_name(const char* name) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  const std::string full = status == 0 && demangled ? demangled : name;
  std::free(demangled);
  // Without template arguments, parameters, and the type before the name; the anonymous namespace has no name to keep.
  const std::string anonymous = "(anonymous namespace)::";
  std::string kept;
  int depth = 0;
  for (size_t i = 0; i < full.size(); i++) {
    const char c = full[i];
    if (depth == 0 && full.compare(i, anonymous.size(), anonymous) == 0) {
      i += anonymous.size() - 1;
    } else if (c == '<') {
      depth++;
    } else if (c == '>') {
      depth--;
    } else if (depth > 0) {
      continue;
    } else if (c == '(') {
      break;
    } else if (c == ' ') {
      kept.clear();
    } else {
      kept += c;
    }
  }
  return kept.empty() ? full : kept;
}

namespace {
uint64_t system_ns() {
  return uint64_t(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count());
}
}  // namespace

#if FSDP_CUPTI
namespace {

// The functions of the library that are called here.
struct Cupti {
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks;
  decltype(&cuptiActivityEnable) enable;
  decltype(&cuptiActivityDisable) disable;
  decltype(&cuptiActivityFlushAll) flush;
  decltype(&cuptiActivityGetNextRecord) next_record;
  decltype(&cuptiActivityGetNumDroppedRecords) dropped_records;
  decltype(&cuptiGetTimestamp) timestamp;
  decltype(&cuptiGetStreamIdEx) stream_id;
  decltype(&cuptiGetResultString) result_string;
};

// RUNTIME and DRIVER are the host's calls: by them a kernel finds the moment at which it was issued.
constexpr CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_RUNTIME,           CUPTI_ACTIVITY_KIND_DRIVER,
                                        CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                        CUPTI_ACTIVITY_KIND_MEMCPY2,           CUPTI_ACTIVITY_KIND_MEMSET};
constexpr size_t buffer_bytes = 4 << 20, buffer_align = 64;

struct State {
  bool open = false;
  Cupti cupti = {};
  // CUPTI may complete buffers on a thread of its own.
  std::mutex mutex;
  bool recording = false;
  std::vector<Record> records;
  std::vector<uint32_t> correlations;             // of the records, one by one
  std::unordered_map<uint32_t, uint64_t> issued;  // by correlation
  size_t dropped = 0;
};
// Never destroyed: CUPTI's threads may end after the program's static objects.
State& state() {
  static State& s = *new State;
  return s;
}

std::string text_of(CUptiResult code) {
  const char* text = nullptr;
  if (state().cupti.result_string) state().cupti.result_string(code, &text);
  return text ? text : strf("error %d", int(code));
}

void check(CUptiResult code, const char* call) {
  if (code != CUPTI_SUCCESS)
    throw CudaError(strf("CUPTI: %s failed on rank %d: %s; leave out --profile and --trace", call, this_rank(),
                         text_of(code).c_str()));
}

const char* name_of_copy(uint8_t kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD:
      return "copy, host to device";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH:
      return "copy, device to host";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD:
      return "copy, device to device";
    case CUPTI_ACTIVITY_MEMCPY_KIND_PTOP:
      return "copy, GPU to GPU";
    default:
      return "copy";
  }
}

// Under the lock.
void add(const CUpti_Activity* any) {
  State& s = state();
  auto push = [&](Record::Kind kind, const char* name, const auto& from, int64_t bytes, bool peer) {
    Record r;
    r.kind = kind, r.name = name, r.peer = peer, r.bytes = bytes;
    r.stream = from.streamId, r.start_ns = from.start, r.end_ns = from.end;
    s.records.push_back(std::move(r));
    s.correlations.push_back(from.correlationId);
  };
  switch (any->kind) {
    case CUPTI_ACTIVITY_KIND_RUNTIME:
    case CUPTI_ACTIVITY_KIND_DRIVER: {
      const auto& call = *reinterpret_cast<const CUpti_ActivityAPI*>(any);
      s.issued[call.correlationId] = call.start;
      return;
    }
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
      const auto& k = *reinterpret_cast<const CUpti_ActivityKernel9*>(any);
      return push(Record::kernel, short_name(k.name ? k.name : "a kernel without a name").c_str(), k, 0,
                  /*peer=*/false);
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
      const auto& c = *reinterpret_cast<const CUpti_ActivityMemcpy5*>(any);
      const bool peer = c.copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_PTOP;
      return push(Record::copy, name_of_copy(c.copyKind), c, int64_t(c.bytes), peer);
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY2: {
      const auto& c = *reinterpret_cast<const CUpti_ActivityMemcpyPtoP4*>(any);
      return push(Record::copy, name_of_copy(CUPTI_ACTIVITY_MEMCPY_KIND_PTOP), c, int64_t(c.bytes), /*peer=*/true);
    }
    case CUPTI_ACTIVITY_KIND_MEMSET: {
      const auto& c = *reinterpret_cast<const CUpti_ActivityMemset4*>(any);
      return push(Record::clear, "clear", c, int64_t(c.bytes), /*peer=*/false);
    }
    default:
      return;
  }
}

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* bytes, size_t* most_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(buffer_align, buffer_bytes));
  *bytes = *buffer ? buffer_bytes : 0;  // without one CUPTI drops records, and says so
  *most_records = 0;                    // as many as there is room for
}

void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t* buffer, size_t, size_t valid) {
  State& s = state();
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    CUpti_Activity* record = nullptr;
    while (s.recording && valid > 0 && s.cupti.next_record(buffer, valid, &record) == CUPTI_SUCCESS) add(record);
    size_t dropped = 0;
    if (s.recording && s.cupti.dropped_records(context, stream, &dropped) == CUPTI_SUCCESS) s.dropped += dropped;
  }
  std::free(buffer);
}

// The first that fails, or CUPTI_SUCCESS.
CUptiResult enable_all() {
  for (CUpti_ActivityKind kind : kinds)
    if (const CUptiResult code = state().cupti.enable(kind); code != CUPTI_SUCCESS) return code;
  return CUPTI_SUCCESS;
}
CUptiResult disable_all() {
  CUptiResult first = CUPTI_SUCCESS;
  for (CUpti_ActivityKind kind : kinds)
    if (const CUptiResult code = state().cupti.disable(kind); first == CUPTI_SUCCESS) first = code;
  return first;
}

}  // namespace

bool is_open() { return state().open; }

bool open(std::string* why) {
  State& s = state();
  if (s.open) return true;
  Library library(strf("libcupti.so.%d", CUDART_VERSION / 1000));
  Cupti& c = s.cupti;
  library.find("cuptiActivityRegisterCallbacks", &c.register_callbacks);
  library.find("cuptiActivityEnable", &c.enable), library.find("cuptiActivityDisable", &c.disable);
  library.find("cuptiActivityFlushAll", &c.flush), library.find("cuptiActivityGetNextRecord", &c.next_record);
  library.find("cuptiActivityGetNumDroppedRecords", &c.dropped_records);
  library.find("cuptiGetTimestamp", &c.timestamp), library.find("cuptiGetStreamIdEx", &c.stream_id);
  library.find("cuptiGetResultString", &c.result_string);
  if (!library.why().empty()) {
    *why = library.why();
    return false;
  }
  // Once on and off again: what refuses says so here and not at the last step, and CUDA graphs that are made from here
  // on can be recorded.
  CUptiResult code = c.register_callbacks(give_buffer, take_buffer);
  if (code == CUPTI_SUCCESS) {
    code = enable_all();
    const CUptiResult off = disable_all();
    if (code == CUPTI_SUCCESS) code = off;
  }
  if (code != CUPTI_SUCCESS) {
    *why = "CUPTI says " + text_of(code);
    return false;
  }
  return s.open = true;
}

void start() {
  State& s = state();
  ASSERT(s.open && !s.recording);
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.records.clear(), s.correlations.clear(), s.issued.clear();
    s.dropped = 0, s.recording = true;
  }
  check(enable_all(), "cuptiActivityEnable");
}

std::vector<Record> stop() {
  State& s = state();
  ASSERT(s.open && s.recording);
  check(disable_all(), "cuptiActivityDisable");
  check(s.cupti.flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "cuptiActivityFlushAll");
  std::lock_guard<std::mutex> lock(s.mutex);
  s.recording = false;
  if (s.dropped > 0)
    throw CudaError(strf("CUPTI: %zu records were dropped on rank %d; free host memory", s.dropped, this_rank()));
  for (size_t i = 0; i < s.records.size(); i++)
    if (const auto call = s.issued.find(s.correlations[i]); call != s.issued.end())
      s.records[i].issued_ns = call->second;
  std::vector<Record> all = std::move(s.records);
  s.records.clear(), s.correlations.clear(), s.issued.clear();
  std::stable_sort(all.begin(), all.end(), [](const Record& a, const Record& b) { return a.start_ns < b.start_ns; });
  return all;
}

uint64_t now() {
  uint64_t t = 0;
  return state().open && state().cupti.timestamp(&t) == CUPTI_SUCCESS ? t : system_ns();
}

uint32_t stream_number(const Stream& s) {
  ASSERT(state().open);
  uint32_t number = 0;
  constexpr uint8_t per_thread = 0;  // the default stream is none of ours
  check(state().cupti.stream_id(nullptr, s.cuda(), per_thread, &number), "cuptiGetStreamIdEx");
  return number;
}

#else

bool is_open() { return false; }
bool open(std::string* why) {
  *why = "this build has none";
  return false;
}
void start() { throw CudaError("internal error: this build has no CUPTI"); }
std::vector<Record> stop() { throw CudaError("internal error: this build has no CUPTI"); }
uint64_t now() { return system_ns(); }
uint32_t stream_number(const Stream&) { throw CudaError("internal error: this build has no CUPTI"); }

#endif

}  // namespace activity

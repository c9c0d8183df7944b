// A test's arrays where the stream's device can use them: themselves on a CPU, copies on a GPU. What is copied or made
// here lies between two strips of 0xff bytes, which nobody may write to.
#pragma once

#include <algorithm>
#include <cstring>
#include <list>
#include <vector>

#include "test/catch.h"

class Arrays {
 public:
  explicit Arrays(Stream& s) : s_(s) {}
  Arrays(const Arrays&) = delete;
  ~Arrays() {
#if FSDP_CUDA
    for (char* p : on_gpu_) cudaFree(p);
#endif
  }
  // v must stay where it is until down(). A vector of nothing gets one number, so that its address is one.
  template <class T>
  T* up(std::vector<T>& v) {
    if (v.empty()) v.resize(1);
    if (!s_.on_gpu()) return v.data();
    const int64_t bytes = int64_t(v.size() * sizeof(T));
    char* p = make(bytes);
    copies_.push_back({p, v.data(), bytes});
    s_.copy(p, v.data(), bytes);
    s_.synchronize();
    return reinterpret_cast<T*>(p);
  }
  // n numbers of 0xff bytes.
  template <class T>
  T* scratch(int64_t n) {
    return reinterpret_cast<T*>(make(n * int64_t(sizeof(T))));
  }
  // Brings all copies back, inputs too, and looks at the strips.
  void down() {
    for (const Copy& c : copies_) s_.copy(c.host, c.device, c.bytes);
    std::vector<char> strips(2 * strip * made_.size());
    char* to = strips.data();
    for (const Made& m : made_)
      s_.copy(to, m.p - strip, strip), s_.copy(to + strip, m.p + m.bytes, strip), to += 2 * strip;
    s_.synchronize();
    CHECK(std::all_of(strips.begin(), strips.end(), [](char c) { return c == char(0xff); }));
  }

 private:
  static constexpr int64_t strip = 256;
  struct Copy {
    void *device, *host;
    int64_t bytes;
  };
  struct Made {
    char* p;
    int64_t bytes;
  };
  char* make(int64_t bytes) {
    const size_t all = size_t(bytes + 2 * strip);
    char* p = nullptr;
    if (s_.on_gpu()) {
#if FSDP_CUDA
      CUDA_CHECK(cudaMalloc(&p, all));
      on_gpu_.push_back(p);
      CUDA_CHECK(cudaMemset(p, 0xff, all));
      CUDA_CHECK(cudaDeviceSynchronize());  // our stream does not wait for the one that this ran on
#endif
    } else {
      on_cpu_.emplace_back(all / sizeof(double) + 1);
      p = reinterpret_cast<char*>(on_cpu_.back().data());
      std::memset(p, 0xff, all);
    }
    made_.push_back({p + strip, bytes});
    return p + strip;
  }

  Stream& s_;
  std::vector<Copy> copies_;
  std::vector<Made> made_;
  std::vector<char*> on_gpu_;
  std::list<std::vector<double>> on_cpu_;  // doubles: aligned for every type here
};

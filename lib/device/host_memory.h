// Host memory that copies to and from the device can run beside (pinned on a GPU). Not part of the plan: the program
// makes a few at start and none in a step.
//
//   HostBuffer<double> results(dev, 2);                  // zeroed
//   s.copy(results.get(), scalars, 2 * sizeof(double));
//   s.synchronize();
//   use(results[0], results[1]);
#pragma once

#include <cstdint>

struct Device;

void* take_host_memory(Device& dev, int64_t bytes, bool* pinned);  // zeroed
void give_host_memory(void* p, bool pinned);
template <class T>
class HostBuffer {
 public:
  HostBuffer(Device& dev, int64_t n)
      : p_(static_cast<T*>(take_host_memory(dev, n * int64_t(sizeof(T)), &pinned_))), n_(n) {}
  ~HostBuffer() { give_host_memory(p_, pinned_); }
  HostBuffer(HostBuffer&& o) noexcept : pinned_(o.pinned_), p_(o.p_), n_(o.n_) { o.p_ = nullptr; }
  HostBuffer& operator=(HostBuffer&&) = delete;
  T* get() const { return p_; }
  T& operator[](int64_t i) const { return p_[i]; }
  int64_t size() const { return n_; }

 private:
  bool pinned_ = false;
  T* p_;
  int64_t n_;
};

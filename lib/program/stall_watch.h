// Says when no step has ended for a while. It ends nothing.
//
//   StallWatch watch(180, [](double seconds, int64_t step) { ... });
//   for (...) watch.step_ended(step);
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

// A thread of its own for as long as it lives. It says so once for a stall: again only when a step has ended since.
class StallWatch {
 public:
  // say: called on that thread with the seconds since a step ended, or since the watch began, and that step.
  // seconds 0: nobody watches.
  StallWatch(double seconds, std::function<void(double seconds, int64_t step)> say);
  ~StallWatch();
  StallWatch(const StallWatch&) = delete;
  void step_ended(int64_t step);

 private:
  using Clock = std::chrono::steady_clock;
  void watch(double seconds);
  const std::function<void(double, int64_t)> say_;
  std::mutex mutex_;
  std::condition_variable ends_;
  bool end_ = false;
  int64_t step_ = 0;
  Clock::time_point ended_ = Clock::now();
  std::thread thread_;
};

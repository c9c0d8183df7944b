#include "lib/program/stall_watch.h"

#include <utility>

StallWatch::StallWatch(double seconds, std::function<void(double, int64_t)> say) : say_(std::move(say)) {
  if (seconds > 0) thread_ = std::thread([=] { watch(seconds); });
}

StallWatch::~StallWatch() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    end_ = true;
  }
  ends_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// Wakes nobody: the thread sleeps until a stall would be due, and looks then.
void StallWatch::step_ended(int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_ = step, ended_ = Clock::now();
}

void StallWatch::watch(double seconds) {
  const auto limit = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::unique_lock<std::mutex> lock(mutex_);
  Clock::time_point said = Clock::time_point::min();  // the stall that began then
  while (!ends_.wait_until(lock, (said == ended_ ? Clock::now() : ended_) + limit, [&] { return end_; })) {
    const Clock::time_point since = ended_, now = Clock::now();
    if (since == said || now - since < limit) continue;
    said = since;
    const int64_t step = step_;
    lock.unlock();
    say_(std::chrono::duration<double>(now - since).count(), step);
    lock.lock();
  }
}

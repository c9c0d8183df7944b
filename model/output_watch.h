// Which module of a step first hands on something that is infinite or not a number.
#pragma once

#include "lib/device/device.h"
#include "lib/ops/ops.h"

class OutputWatch {
 public:
  OutputWatch(Device& dev, int modules)
      : dev_(dev),
        modules_(modules),
        bad_(dev.mem.keep<int32_t>(modules, "outputs that are not finite", Purpose::workspace)) {}
  // From begin() to end() look_at() marks modules; otherwise it does nothing. Not for a graph.
  void begin() {
    watches_ = true;
    dev_.compute().zero(bad_, modules_ * int64_t(sizeof(int32_t)));
  }
  void end() { watches_ = false; }
  template <class X>
  void look_at(int module, const X* output, int64_t n) {
    if (watches_) ops::flag_not_finite<X>(dev_.compute(), bad_ + module, output, n);
  }
  const int32_t* bad() const { return bad_; }  // (modules), on the device

 private:
  Device& dev_;
  int modules_;
  int32_t* bad_;
  bool watches_ = false;
};

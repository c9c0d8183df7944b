// How long the compute stream stands still for communication, which is what of it is not hidden behind computation.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "lib/device/device.h"

class ExposedTime {
 public:
  enum Of { gathers, reductions };
  // communicates: somebody else is waited for. Alone, a rank waits for its own casts, which are no communication.
  ExposedTime(Device& dev, bool communicates) : dev_(dev), communicates_(communicates) {}

  // Waits of the compute stream are timed from begin() to end(). Two steps are kept: that of the latest begin() and the
  // one before, which can be read while the latest still runs.
  void begin();
  void end() { timing_ = false; }
  void wait(Of of, const Event& e);
  // In ms, of the latest step or the one before; waits for it.
  void read(bool latest, double* of_gathers, double* of_reductions);

 private:
  struct Waits {
    std::vector<std::pair<Event, Event>> events;  // before and behind each wait; made once, used in every timed step
    size_t used = 0;
  };
  Device& dev_;
  bool communicates_;
  Waits waits_[2][2];  // [step][gathers, reductions]
  int step_ = 0;
  bool timing_ = false;
};

#include "lib/program/anomalies.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "lib/device/error.h"
#include "lib/program/format.h"

bool gates_collapsed(const NsaStats& s) {
  return s.rows > 0 && (s.entropy_mean < thresholds::entropy_mean || s.share_max_mean > thresholds::share_max_mean ||
                        s.collapsed > thresholds::collapsed);
}

std::vector<Anomaly> Anomalies::judge(double seconds, double tokens, const NsaStats* gates) {
  std::vector<Anomaly> found;
  const double passed = seconds - seconds_, trained = tokens - tokens_;
  if (begun_ && passed < thresholds::reading_seconds) return found;
  seconds_ = seconds, tokens_ = tokens;
  if (!std::exchange(begun_, true)) return found;

  const double throughput = trained / passed;
  if (slow_.add(throughput < thresholds::fallen * held_))
    found.push_back(
        {"throughput", strf("throughput has fallen: %d readings in a row below %.0f %% of the %s tokens/s "
                            "that as many had held before, the latest %s",
                            thresholds::throughput_readings, 100 * thresholds::fallen,
                            grouped(std::llround(held_)).c_str(), grouped(std::llround(throughput)).c_str())});
  latest_.push_back(throughput);
  if (int(latest_.size()) > thresholds::throughput_readings) latest_.erase(latest_.begin());
  if (int(latest_.size()) == thresholds::throughput_readings)
    held_ = std::max(held_, *std::min_element(latest_.begin(), latest_.end()));

  if (gates && collapsed_.add(gates_collapsed(*gates)))
    found.push_back({"gate_collapse",
                     strf("gates have collapsed: %d readings in a row, the latest with entropy %.3f nats (collapsed "
                          "below %g), a mean largest share of %.3f (above %g), %.1f %% of gates collapsed (above %.0f "
                          "%%); shares: compressed %.3f, selected %.3f, window %.3f",
                          thresholds::gate_readings, gates->entropy_mean, thresholds::entropy_mean,
                          gates->share_max_mean, thresholds::share_max_mean, 100 * gates->collapsed,
                          100 * thresholds::collapsed, gates->share[0], gates->share[1], gates->share[2])});
  return found;
}

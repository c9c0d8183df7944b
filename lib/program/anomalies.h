// What is wrong with a run that goes on, as its steps tell: throughput that has fallen, gates that have collapsed. Each
// is said once, and again only after a reading that was well. Nothing is done about it.
//
//   Anomalies anomalies;
//   for (const Anomaly& a : anomalies.judge(seconds, tokens, gates)) note(a.text);
#pragma once

#include <string>
#include <vector>

#include "nsa_attention.h"

struct Anomaly {
  const char* name;  // throughput, gate_collapse
  std::string text;  // with the figures, for people
};

// The thresholds are those of the report's watchdog, but for two that would cry wolf here. It waits for a
// throughput of 0, which a run that stands still never reports: half of what was reached counts instead. And it takes
// the largest gate of any query for a branch's share of all of them, where one decided query is no collapse.
namespace thresholds {
constexpr double reading_seconds = 30;  // between two readings, at least
constexpr int throughput_readings = 4;  // in a row
constexpr double fallen = 0.5;          // of the best that so many readings in a row have held
constexpr int gate_readings = 3;        // in a row, with one of:
constexpr double entropy_mean = 0.2;    // nats, below
constexpr double share_max_mean = 0.9;  // above
constexpr double collapsed = 0.5;       // above
}  // namespace thresholds

bool gates_collapsed(const NsaStats& s);

class Anomalies {
 public:
  // seconds: of any clock; tokens: trained on so far; gates: of the latest step, null where nobody counts them. Says
  // nothing between readings; the first call is where the first reading begins.
  std::vector<Anomaly> judge(double seconds, double tokens, const NsaStats* gates);

 private:
  struct InARow {  // whether so many bad ones have come in a row, once for each such row
    int wanted, bad = 0;
    bool add(bool is_bad) { return (bad = is_bad ? bad + 1 : 0) == wanted; }
  };
  bool begun_ = false;
  double seconds_ = 0, tokens_ = 0;  // at the latest reading
  std::vector<double> latest_ = {};  // throughputs
  double held_ = 0;                  // the best that throughput_readings in a row have held
  InARow slow_{thresholds::throughput_readings}, collapsed_{thresholds::gate_readings};
};

// What nsa_stats counts, shared by the kernel and its twin: sums in double, in one order, so that two runs agree.
#pragma once

#include <cmath>

#include "nsa_attention.h"

struct StatsSum {
  double n = 0, entropy = 0, entropy_min = 1e30, gate_max = 0, share[3] = {0, 0, 0}, collapsed = 0;
  double rows = 0, keys = 0, keys_max = 0, at_max = 0;

  // The gates' logits of one query and head.
  HD void add_gates(const float (&logit)[3]) {
    double g[3], sum = 0, h = 0, most = 0;
    for (int i = 0; i < 3; ++i) {
      g[i] = 1 / (1 + exp(-double(logit[i])));
      gate_max = gate_max > g[i] ? gate_max : g[i];
      sum += g[i];
    }
    for (int i = 0; i < 3; ++i) {
      const double p = sum > 0 ? g[i] / sum : 1.0 / 3;
      share[i] += p;
      most = most > p ? most : p;
      if (p > 0) h -= p * log(p);
    }
    n += 1;
    entropy += h;
    entropy_min = entropy_min < h ? entropy_min : h;
    collapsed += h < 0.1 && most > 0.95;
  }
  // The blocks of one query and KV head: how many of their keys it sees.
  HD void add_query(int64_t t, const int32_t* blocks, const NsaShape& a) {
    int64_t seen = 0;
    for (int64_t i = 0; i < a.selected && blocks[i] >= 0; ++i) {
      const int64_t first = blocks[i] * a.select_block, end = first + a.select_block;
      seen += (end < t + 1 ? end : t + 1) - first;
    }
    StatsSum one;
    one.rows = 1, one.keys = one.keys_max = double(seen), one.at_max = 1;
    merge(one);
  }
  HD void merge(const StatsSum& o) {
    n += o.n, entropy += o.entropy, collapsed += o.collapsed, rows += o.rows, keys += o.keys;
    entropy_min = entropy_min < o.entropy_min ? entropy_min : o.entropy_min;
    gate_max = gate_max > o.gate_max ? gate_max : o.gate_max;
    for (int i = 0; i < 3; ++i) share[i] += o.share[i];
    if (o.keys_max > keys_max) keys_max = o.keys_max, at_max = o.at_max;
    else if (o.keys_max == keys_max) at_max += o.at_max;
  }
  HD NsaStats result() const {
    NsaStats s;
    s.entropy_mean = float(entropy / n), s.entropy_min = float(entropy_min), s.gate_max = float(gate_max);
    for (int i = 0; i < 3; ++i) s.share[i] = float(share[i] / n);
    s.collapsed = float(collapsed / n);
    s.keys_mean = float(keys / rows), s.keys_max = float(keys_max), s.rows = float(rows);
    s.at_max = float(at_max / rows);
    return s;
  }
  // Query i of all B*T: its heads and its KV heads.
  template <class T>
  HD void add_row(int64_t i, int h, const T* x, const int32_t* indices, const NsaShape& a) {
    if (h < a.H) {
      const T* gates = x + i * a.ld + a.gate(0) + h;
      add_gates({float(gates[0]), float(gates[a.H]), float(gates[2 * a.H])});
    }
    if (h < a.HKV) add_query(i % a.T, indices + ((i / a.T * a.HKV + h) * a.T + i % a.T) * a.selected, a);
  }
};
// Queries whose sum is one partial.
constexpr int64_t stats_rows = 64;

// What nsa_stats counts, shared by the kernel and its twin: sums in double, in one order, so that two runs agree. What
// is summed is made in float, for exponentials and logarithms in double are long.
#pragma once

#include <cmath>

#include "nsa_attention.h"

struct StatsSum {
  NsaSums sums;
  NsaMaxima maxima;

  // The gates' logits of one query and head.
  HD void add_gates(const float (&logit)[3]) {
    float g[3], sum = 0, h = 0, most = 0;
    for (int i = 0; i < 3; ++i) {
      g[i] = 1 / (1 + expf(-logit[i]));
      raise(maxima.gate, double(g[i]));
      sum += g[i];
    }
    for (int i = 0; i < 3; ++i) {
      const float p = sum > 0 ? g[i] / sum : 1.0f / 3;
      sums.share[i] += double(p);
      most = most > p ? most : p;
      if (p > 0) h -= p * logf(p);
    }
    sums.gates += 1;
    sums.entropy += double(h);
    sums.largest_share += double(most);
    sums.collapsed += h < 0.1f && most > 0.95f;
    raise(maxima.share, double(most));
    raise(maxima.entropy_lack, ln_3 - double(h));
  }
  // The blocks of one query and KV head: how many of their keys it sees.
  HD void add_query(int64_t t, const int32_t* blocks, const NsaShape& a) {
    int64_t seen = 0;
    // Not stopped at the first -1, so that no load waits for the one before it.
    for (int64_t i = 0; i < a.selected; ++i) {
      const int64_t first = blocks[i] * a.select_block, end = first + a.select_block;
      seen += blocks[i] >= 0 ? (end < t + 1 ? end : t + 1) - first : 0;
    }
    const int64_t selectable = a.selected * a.select_block;
    sums.rows += 1;
    sums.keys += double(seen);
    sums.at_max += seen == (selectable < a.T ? selectable : a.T);
    raise(maxima.keys, double(seen));
  }
  HD void merge(const StatsSum& o) {
    NsaSums& s = sums;
    s.gates += o.sums.gates, s.entropy += o.sums.entropy, s.largest_share += o.sums.largest_share;
    for (int i = 0; i < 3; ++i) s.share[i] += o.sums.share[i];
    s.collapsed += o.sums.collapsed, s.rows += o.sums.rows, s.keys += o.sums.keys, s.at_max += o.sums.at_max;
    raise(maxima.entropy_lack, o.maxima.entropy_lack);
    raise(maxima.gate, o.maxima.gate), raise(maxima.share, o.maxima.share), raise(maxima.keys, o.maxima.keys);
  }
  // Query i of all B*T: its heads and its KV heads.
  template <class T>
  HD void add_row(int64_t i, int h, const T* x, const int32_t* indices, const int32_t* targets, const NsaShape& a) {
    const T* gates = x + i * a.ld + a.gate(0) + h;
    const float logits[3] = {float(gates[0]), float(gates[a.H]), float(gates[2 * a.H])};
    if (targets[i] < 0) return;
    add_gates(logits);
    if (h < a.HKV) add_query(i % a.T, indices + ((i / a.T * a.HKV + h) * a.T + i % a.T) * a.selected, a);
  }

 private:
  static constexpr double ln_3 = 1.0986122886681098;
  HD static void raise(double& most, double x) { most = most > x ? most : x; }
};
// A layer's partial sums: one for each block of threads on a GPU.
constexpr int64_t stats_partials = 256;

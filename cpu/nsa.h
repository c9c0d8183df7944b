// Native Sparse Attention (Yuan et al. 2025, arXiv 2502.11089) in plain loops: the twins of the stages in
// nsa_attention.h, for the CPU backend and as the oracle of the kernels' tests. The compressed and window branches are
// cpu/attention.h's; here are phi (eq. 7), the selection (eq. 8 to 12), attention over what it chose, and the gates
// (eq. 5).
//
// One thread. Attention to selected blocks goes tile by tile of 64 queries of one head; in a tile each selection block
// in ascending order gathers the queries that chose it, so that the products are of matrices. A query's sums run over
// its own blocks in ascending order and in each over its keys: who else is in the tile changes none of its bits. dk and
// dv sum over the heads of the group, then over queries.
#pragma once

#include "attention/stats.h"
#include "cpu/attention.h"

namespace cpu {
namespace nsa_detail {

// Eq. 9: selection block j's score from the probabilities of the `seen` first compressed keys. Counted in strides, key
// i covers [i, i + block / stride) and the block [j, j + 1) select_block / stride; what they share is the weight.
template <class A>
A block_score(const A* p, int64_t seen, int64_t j, const NsaShape& a) {
  const int64_t in_key = a.block / a.stride, from = j * (a.select_block / a.stride),
                to = from + a.select_block / a.stride;
  A sum = 0;
  for (int64_t i = std::max<int64_t>(0, from - in_key + 1); i < std::min(seen, to); ++i)
    sum += p[i] * A(std::min(i + in_key, to) - std::max(i, from));
  return sum;
}

// For each block that one of m queries (rows of `indices`, n each) chose, in ascending order: f(block, rows, slots,
// count), where queries rows[0..count), ascending, have it at slots[..] of their lists.
template <class F>
void for_each_block(const int32_t* indices, int64_t n, int m, int64_t blocks, F f) {
  int rows[attention_detail::BM], slots[attention_detail::BM], next[attention_detail::BM] = {};
  for (int64_t block = 0; block < blocks; ++block) {
    int count = 0;
    for (int i = 0; i < m; ++i)
      if (next[i] < n && indices[i * n + next[i]] == block) rows[count] = i, slots[count++] = next[i]++;
    if (count) f(block, rows, slots, count);
  }
}

template <class A>
void gather(A* to, const A* from, const int* rows, int count, int64_t D) {
  for (int i = 0; i < count; ++i) std::copy(from + rows[i] * D, from + (rows[i] + 1) * D, to + i * D);
}
template <class A>
void scatter_add(A* to, const A* from, const int* rows, int count, int64_t D) {
  for (int i = 0; i < count; ++i)
    for (int64_t d = 0; d < D; ++d) to[rows[i] * D + d] += from[i * D + d];
}

}  // namespace nsa_detail

// ------------------------------------------------------------------------------------------------------- compression

namespace nsa_detail {
template <class T>
void mean_of(T* out, const T* x, const NsaShape& a) {
  using A = acc_t<T>;
  const int64_t keys = a.compressed(), C = a.HKV * a.D;
  std::vector<A> sum(C);
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t i = 0; i < keys; ++i) {
      std::fill(sum.begin(), sum.end(), A(0));
      for (int64_t r = 0; r < a.block; ++r) {
        const T* row = x + (b * a.T + a.stride * i + r) * a.ld;
        for (int64_t c = 0; c < C; ++c) sum[c] += A(row[c]);
      }
      for (int64_t c = 0; c < C; ++c) out[(b * keys + i) * C + c] = T(sum[c] / A(a.block));
    }
}

// dx[t] = factor * the sum over the blocks i that hold token t, in their order, of row(b, i, t - stride i), a function
// that gives HKV D numbers as (numbers, distance between heads).
template <class T, class Row>
void sum_over_blocks(T* dx, acc_t<T> factor, const NsaShape& a, Row row) {
  using A = acc_t<T>;
  const int64_t keys = a.compressed();
  std::vector<A> sum(a.HKV * a.D);
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t t = 0; t < a.T; ++t) {
      const int64_t first = compressed_keys(t, a.block, a.stride), end = std::min(keys, t / a.stride + 1);
      std::fill(sum.begin(), sum.end(), A(0));
      for (int64_t i = first; i < end; ++i)
        for (int64_t h = 0; h < a.HKV; ++h) {
          const T* from = row(b * keys + i, h, t - a.stride * i);
          for (int64_t d = 0; d < a.D; ++d) sum[h * a.D + d] += A(from[d]);
        }
      for (int64_t c = 0; c < a.HKV * a.D; ++c) dx[(b * a.T + t) * a.ld + c] = T(sum[c] * factor);
    }
}
}  // namespace nsa_detail

template <class T>
void nsa_mean(T* k, T* v, const T* x, const NsaShape& a) {
  nsa_detail::mean_of(k, x + a.k(0), a);
  nsa_detail::mean_of(v, x + a.v(0), a.of_values());
}
template <class T>
void nsa_mean_backward(T* dx, const T* dk, const T* dv, const NsaShape& a) {
  const auto one = [](T* columns, const T* dout, const NsaShape& of) {
    nsa_detail::sum_over_blocks(columns, acc_t<T>(1) / acc_t<T>(of.block), of,
                                [=](int64_t i, int64_t h, int64_t) { return dout + (i * of.HKV + h) * of.D; });
  };
  one(dx + a.k(0), dk, a);
  one(dx + a.v(0), dv, a.of_values());
}

template <class T>
void nsa_blocks(T* blocks, const T* x, const T* position, const NsaShape& a) {
  using A = acc_t<T>;
  const int64_t keys = a.compressed();
  for (int64_t h = 0; h < a.HKV; ++h)
    for (int64_t b = 0; b < a.B; ++b)
      for (int64_t i = 0; i < keys; ++i)
        for (int64_t r = 0; r < a.block; ++r, blocks += a.D) {
          const T *row = x + (b * a.T + a.stride * i + r) * a.ld + h * a.D, *at = position + (h * a.block + r) * a.D;
          for (int64_t d = 0; d < a.D; ++d) blocks[d] = T(A(row[d]) + A(at[d]));
        }
}

template <class T, class G>
void nsa_blocks_backward(T* dx, G* dposition, const T* dblocks, acc_t<T>* /*partials*/, const NsaShape& a) {
  using A = acc_t<T>;
  const int64_t rows = a.B * a.compressed(), n = a.block * a.D;
  nsa_detail::sum_over_blocks(dx, A(1), a,
                              [=](int64_t i, int64_t h, int64_t r) { return dblocks + (h * rows + i) * n + r * a.D; });
  std::vector<A> sum(n);
  for (int64_t h = 0; h < a.HKV; ++h) {
    std::fill(sum.begin(), sum.end(), A(0));
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t c = 0; c < n; ++c) sum[c] += A(dblocks[(h * rows + i) * n + c]);
    for (int64_t c = 0; c < n; ++c) dposition[h * n + c] = G(sum[c]);
  }
}

template <class T>
void nsa_heads_last(T* out, const T* x, int64_t heads, int64_t rows, int64_t D) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads; ++h)
      std::copy(x + (h * rows + r) * D, x + (h * rows + r + 1) * D, out + (r * heads + h) * D);
}
template <class T>
void nsa_heads_first(T* out, const T* x, int64_t heads, int64_t rows, int64_t D) {
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t r = 0; r < rows; ++r)
      std::copy(x + (r * heads + h) * D, x + (r * heads + h + 1) * D, out + (h * rows + r) * D);
}

// ---------------------------------------------------------------------------------------------------- choosing: top-k

template <class T>
void nsa_topk(int32_t* indices, const T* q, const T* k, const acc_t<T>* lse, acc_t<T>* /*scratch*/, const NsaShape& a) {
  using namespace attention_detail;
  using A = acc_t<T>;
  const int64_t D = a.D, n = a.selected, keys = a.compressed(), ldk = padded(keys), blocks = a.select_blocks();
  const int64_t group = a.H / a.HKV;
  std::vector<A> kt(ldk * D), qs(BM * D), p(BM * ldk), score(BM * blocks);
  std::vector<int32_t> others;
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t head = 0; head < a.HKV; ++head) {
      widen_transposed(kt.data(), ldk, k + b * keys * a.HKV * D + head * D, a.HKV * D, keys, D);
      for (int64_t t0 = 0; t0 < a.T; t0 += BM) {
        const int m = int(std::min<int64_t>(BM, a.T - t0));
        const int64_t n_tile = padded(a.compressed_seen(t0 + m - 1));
        std::fill(score.begin(), score.end(), A(0));
        for (int64_t h = head * group; h < (head + 1) * group; ++h) {
          widen(qs.data(), q + (b * a.T + t0) * a.ld + h * D, a.ld, m, D);
          std::fill(p.begin(), p.end(), A(0));
          multiply_add(p.data(), ldk, qs.data(), D, 1, kt.data(), ldk, whole_rows(m), int(n_tile), int(D));
          for (int i = 0; i < m; ++i) {
            const int64_t t = t0 + i, seen = a.compressed_seen(t);
            const A l = lse[(b * a.H + h) * a.T + t];
            A* row = p.data() + i * ldk;
            for (int64_t c = 0; c < seen; ++c) row[c] = exponential(row[c] * A(a.scale) - l);  // eq. 8
            for (int64_t j = 0; j <= t / a.select_block; ++j)
              score[i * blocks + j] += nsa_detail::block_score(row, seen, j, a);  // eq. 10: over the group's heads
          }
        }
        for (int i = 0; i < m; ++i) {  // eq. 11
          const int32_t own = int32_t((t0 + i) / a.select_block);
          int32_t* list = indices + ((b * a.HKV + head) * a.T + t0 + i) * n;
          if (own < n) {
            for (int32_t j = 0; j < n; ++j) list[j] = j <= own ? j : -1;
            continue;
          }
          const A* s = &score[i * blocks];
          others.clear();
          for (int32_t j = 1; j < own - 1; ++j) others.push_back(j);
          std::partial_sort(others.begin(), others.begin() + (n - 3), others.end(),
                            [s](int32_t x, int32_t y) { return s[x] > s[y] || (s[x] == s[y] && x < y); });
          std::sort(others.begin(), others.begin() + (n - 3));
          list[0] = 0;
          std::copy(others.begin(), others.begin() + (n - 3), list + 1);
          list[n - 2] = own - 1, list[n - 1] = own;
        }
      }
    }
}

template <class T>
void nsa_selected_forward(T* o, acc_t<T>* lse, const T* q, const T* k, const T* v, const int32_t* indices,
                          char* /*scratch*/, const NsaShape& a) {
  using namespace attention_detail;
  using A = acc_t<T>;
  const int64_t D = a.D, DV = a.v_dim(), n = a.selected, L = a.select_block, group = a.H / a.HKV;
  const int64_t keys = a.select_blocks() * L;  // with the last block padded with zeros
  std::vector<A> kt(keys * D), vs(keys * DV), qs(BM * D), part(BM * L), out(BM * DV);
  std::vector<A> s(BM * std::min(n * L, keys));      // of a tile
  std::vector<A> some_q(BM * D), some_out(BM * DV);  // of a block's queries
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t head = 0; head < a.HKV; ++head) {
      widen_transposed(kt.data(), keys, k + b * a.T * a.ld + head * D, a.ld, a.T, D);
      widen(vs.data(), v + b * a.T * a.ld + head * DV, a.ld, a.T, DV);
      for (int64_t h = head * group; h < (head + 1) * group; ++h)
        for (int64_t t0 = 0; t0 < a.T; t0 += BM) {
          const int m = int(std::min<int64_t>(BM, a.T - t0));
          const int64_t blocks = (t0 + m - 1) / L + 1, width = std::min(n, blocks) * L;
          const int32_t* lists = indices + ((b * a.HKV + head) * a.T + t0) * n;
          widen(qs.data(), q + (b * a.T + t0) * a.ld + h * D, a.ld, m, D);
          std::fill(s.begin(), s.begin() + m * width, A(-INFINITY));  // what a query does not see
          std::fill(out.begin(), out.end(), A(0));
          nsa_detail::for_each_block(lists, n, m, blocks, [&](int64_t block, const int* rows, const int* slots, int c) {
            nsa_detail::gather(some_q.data(), qs.data(), rows, c, D);
            std::fill(part.begin(), part.begin() + whole_rows(c) * L, A(0));
            multiply_add(part.data(), L, some_q.data(), D, 1, &kt[block * L], keys, whole_rows(c), int(L), int(D));
            for (int i = 0; i < c; ++i) {
              const int64_t seen = std::min(L, t0 + rows[i] - block * L + 1);
              for (int64_t j = 0; j < seen; ++j) s[rows[i] * width + slots[i] * L + j] = part[i * L + j] * A(a.scale);
            }
          });
          for (int i = 0; i < m; ++i) {
            A* row = &s[i * width];
            A top = -INFINITY, sum = 0;
            for (int64_t j = 0; j < width; ++j) top = row[j] > top ? row[j] : top;
            A& l = lse[(b * a.H + h) * a.T + t0 + i];
            if (top == A(-INFINITY)) {  // an empty list
              std::fill(row, row + width, A(0));
              l = top;
              continue;
            }
            for (int64_t j = 0; j < width; ++j) row[j] = exponential(row[j] - top);
            for (int64_t j = 0; j < width; ++j) sum += row[j];
            for (int64_t j = 0; j < width; ++j) row[j] /= sum;
            l = top + std::log(sum);
          }
          nsa_detail::for_each_block(lists, n, m, blocks, [&](int64_t block, const int* rows, const int* slots, int c) {
            for (int i = 0; i < c; ++i) std::copy_n(&s[rows[i] * width + slots[i] * L], L, &part[i * L]);
            std::fill(some_out.begin(), some_out.begin() + whole_rows(c) * DV, A(0));
            multiply_add(some_out.data(), DV, part.data(), L, 1, &vs[block * L * DV], DV, whole_rows(c), int(DV),
                         int(L));
            nsa_detail::scatter_add(out.data(), some_out.data(), rows, c, DV);
          });
          for (int i = 0; i < m; ++i)
            for (int64_t d = 0; d < DV; ++d) o[((b * a.T + t0 + i) * a.H + h) * DV + d] = T(out[i * DV + d]);
        }
    }
}

template <class T>
void nsa_selected_backward(T* dq, T* dk, T* dv, const T* dq_compressed, const T* d_o, const T* q, const T* k,
                           const T* v, const T* o, const acc_t<T>* lse, const int32_t* indices, char* /*scratch*/,
                           const NsaShape& a, Gate<T> gate) {
  using namespace attention_detail;
  using A = acc_t<T>;
  const int64_t D = a.D, DV = a.v_dim(), n = a.selected, L = a.select_block, group = a.H / a.HKV;
  const int64_t keys = a.select_blocks() * L;
  std::vector<A> ks(keys * D), kt(keys * D), vt(keys * DV), dks(keys * D), dvs(keys * DV);  // t: transposed
  std::vector<A> qs(BM * D), dos(BM * DV), dqs(BM * D), delta(BM);                          // of a tile
  std::vector<A> some_q(BM * D), some_do(BM * DV), some_dq(BM * D), p(BM * L), ds(BM * L);  // of a block's queries
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t head = 0; head < a.HKV; ++head) {
      const int64_t at = b * a.T * a.ld + head * D, at_v = b * a.T * a.ld + head * DV;
      widen(ks.data(), k + at, a.ld, a.T, D);
      widen_transposed(kt.data(), keys, k + at, a.ld, a.T, D);
      widen_transposed(vt.data(), keys, v + at_v, a.ld, a.T, DV);
      std::fill(dks.begin(), dks.end(), A(0));
      std::fill(dvs.begin(), dvs.end(), A(0));
      for (int64_t h = head * group; h < (head + 1) * group; ++h)
        for (int64_t t0 = 0; t0 < a.T; t0 += BM) {
          const int m = int(std::min<int64_t>(BM, a.T - t0));
          const int64_t row = b * a.T + t0;
          const A* l = lse + (b * a.H + h) * a.T + t0;
          widen(qs.data(), q + row * a.ld + h * D, a.ld, m, D);
          widen(dos.data(), d_o + (row * a.H + h) * DV, a.H * DV, m, DV);
          gated_delta(delta.data(), dos.data(), o + (row * a.H + h) * DV, a.H * DV, m, DV, gate, row, h);
          std::fill(dqs.begin(), dqs.end(), A(0));
          nsa_detail::for_each_block(
              indices + ((b * a.HKV + head) * a.T + t0) * n, n, m, (t0 + m - 1) / L + 1,
              [&](int64_t block, const int* rows, const int*, int c) {
                nsa_detail::gather(some_q.data(), qs.data(), rows, c, D);
                nsa_detail::gather(some_do.data(), dos.data(), rows, c, DV);
                std::fill(p.begin(), p.begin() + whole_rows(c) * L, A(0));
                std::fill(ds.begin(), ds.begin() + whole_rows(c) * L, A(0));
                multiply_add(p.data(), L, some_q.data(), D, 1, &kt[block * L], keys, whole_rows(c), int(L), int(D));
                multiply_add(ds.data(), L, some_do.data(), DV, 1, &vt[block * L], keys, whole_rows(c), int(L), int(DV));
                for (int i = 0; i < c; ++i) {
                  A *pi = &p[i * L], *dsi = &ds[i * L];
                  const A li = l[rows[i]], di = delta[rows[i]];
                  const int64_t seen = std::min(L, t0 + rows[i] - block * L + 1);
                  for (int64_t j = 0; j < seen; ++j) {
                    pi[j] = exponential(pi[j] * A(a.scale) - li);
                    dsi[j] = pi[j] * (dsi[j] - di) * A(a.scale);
                  }
                  for (int64_t j = seen; j < L; ++j) pi[j] = dsi[j] = 0;
                }
                std::fill(some_dq.begin(), some_dq.begin() + whole_rows(c) * D, A(0));
                multiply_add(some_dq.data(), D, ds.data(), L, 1, &ks[block * L * D], D, whole_rows(c), int(D), int(L));
                nsa_detail::scatter_add(dqs.data(), some_dq.data(), rows, c, D);
                multiply_add(&dks[block * L * D], D, ds.data(), 1, L, some_q.data(), D, int(L), int(D), c);
                multiply_add(&dvs[block * L * DV], DV, p.data(), 1, L, some_do.data(), DV, int(L), int(DV), c);
              });
          for (int i = 0; i < m; ++i)
            for (int64_t d = 0; d < D; ++d) {
              T& sum = dq[(row + i) * a.ld + h * D + d];
              const A compressed = dq_compressed ? A(dq_compressed[((row + i) * a.H + h) * D + d]) : A(0);
              sum = T(A(sum) + compressed + dqs[i * D + d]);
            }
        }
      for (int64_t j = 0; j < a.T; ++j) {
        for (int64_t d = 0; d < D; ++d) dk[at + j * a.ld + d] = T(dks[j * D + d]);
        for (int64_t d = 0; d < DV; ++d) dv[at_v + j * a.ld + d] = T(dvs[j * DV + d]);
      }
    }
}

// ------------------------------------------------------------------------------------------------------------- gates

template <class T>
void nsa_combine(T* o, const T* compressed, const T* selected, const T* window, const T* x, const NsaShape& a,
                 float* amax) {
  using A = acc_t<T>;
  const T* branch[3] = {compressed, selected, window};
  for (int64_t r = 0; r < a.B * a.T; ++r)
    for (int64_t h = 0; h < a.H; ++h) {
      A g[3];
      for (int i = 0; i < 3; ++i) g[i] = A(1) / (A(1) + std::exp(-A(x[r * a.ld + a.gate(i) + h])));
      const int64_t at = (r * a.H + h) * a.v_dim();
      for (int64_t d = at; d < at + a.v_dim(); ++d)
        o[d] = T(g[0] * A(branch[0][d]) + g[1] * A(branch[1][d]) + g[2] * A(branch[2][d]));
      if (amax) amax[(r / a.T * a.H + h) * a.T + r % a.T] = float(power_sum(GradNorm::inf, o + at, a.v_dim()));
    }
}

template <class T>
void nsa_stats(const std::vector<NsaCounted<T>>& layers, const int32_t* targets, const NsaShape& a) {
  for (const NsaCounted<T>& layer : layers) {
    StatsSum sum;
    for (int64_t i = 0; i < a.B * a.T; ++i)
      for (int h = 0; h < a.H; ++h) sum.add_row(i, h, layer.x, layer.indices, targets, a);
    reinterpret_cast<StatsSum*>(layer.partials)->merge(sum);
  }
}
inline void nsa_stats_total(NsaSums* sums, NsaMaxima* maxima, const double* partials, int64_t layers) {
  for (int64_t layer = 0; layer < layers; ++layer) {
    StatsSum sum;
    for (int64_t i = 0; i < stats_partials; ++i)
      sum.merge(reinterpret_cast<const StatsSum*>(partials)[layer * stats_partials + i]);
    sums[layer] = sum.sums, maxima[layer] = sum.maxima;
  }
}

}  // namespace cpu

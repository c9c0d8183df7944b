// What an operation asks of a chip: the operations tell it to their stream in a dry run (Stream::spend), and an
// estimate of the step's time is made of it.
//
//   if (s.off()) return s.spend(moves<float>(3 * n));    // an elementwise kernel: two tensors read, one written
#pragma once

#include <cstdint>

#include "lib/device/dtype.h"

enum class Work { matmul, attention, memory, optimizer };
struct Cost {
  Work kind;
  double bytes = 0;  // read and written
  double flops = 0;
  double share = 1;  // of the chip's peak, that the FLOPs reach
  Dtype dtype = Dtype::bf16;
  int launches = 1;
  double tasks = 0;  // equal parts that the FLOPs come in, each one multiprocessor's; 0: very many
};
// An operation that takes as long as so many T to and from memory.
template <class T>
Cost moves(int64_t numbers, int launches = 1, Work kind = Work::memory) {
  Cost c{kind, double(numbers) * double(sizeof(T))};
  c.launches = launches;
  return c;
}
enum class Collective { all_gather, reduce_scatter, all_reduce, broadcast };
// What a rank sends of a buffer of `bytes`: all parts but one, and in an all_reduce twice.
inline double sent(Collective kind, double bytes, int ranks) {
  return bytes * (ranks - 1) / ranks * (kind == Collective::all_reduce ? 2 : 1);
}

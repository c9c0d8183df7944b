// What a step issues, in order: collectives and what stands between them, for tests and for people
// (./train --show-schedule).
#pragma once

#include <cstdint>
#include <vector>

#include "lib/comm/comm.h"

struct Issued {
  enum Kind {
    all_gather,
    reduce_scatter,
    all_to_all,
    all_reduce,
    broadcast,
    optimizer,
    use,
    release,
    cast,
    amax,  // an all_reduce of the largest numbers of what is gathered in fp8
    remark
  } kind;
  int unit;       // -1: all
  int64_t bytes;  // of the unsharded buffer; 0: nothing moves between ranks
  Dtype dtype;
  int ranks;              // that it is among
  const char* text = "";  // a remark's: what the model did there
  int64_t times = 1;      // it stands for so many, one in each of the micro-batches that are alike
  double sent() const {   // bytes, by a rank
    const bool reduces = kind == all_reduce || kind == amax;
    return ::sent(reduces ? Collective::all_reduce : Collective::all_gather, double(bytes), ranks);
  }
  bool of_gather() const { return kind == all_gather || kind == amax; }
  bool moves() const { return bytes > 0 || kind == optimizer; }
};
const char* name_of(Issued::Kind kind);  // not of remark
const char* name_of(const Issued& i);
const char* stream_of(const Issued& i);  // gather, reduce or compute

class IssueLog {
 public:
  void begin() { issued_.clear(), on_ = true; }
  void set_times(int64_t n) { times_ = n; }  // what follows stands for n alike
  void note(Issued::Kind kind, int unit, int64_t bytes = 0, Dtype dtype = Dtype::f32, int ranks = 1,
            const char* text = "") {
    if (on_) issued_.push_back({kind, unit, bytes, dtype, ranks, text, times_});
  }
  const std::vector<Issued>& all() const { return issued_; }

 private:
  bool on_ = false;
  int64_t times_ = 1;
  std::vector<Issued> issued_;
};

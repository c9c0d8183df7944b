#include "fsdp/issued.h"

const char* name_of(Issued::Kind kind) {
  static const char* names[] = {"all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "optimizer",
                                "use",        "release",        "cast",       "amax"};
  return names[kind];
}
const char* name_of(const Issued& i) { return i.kind == Issued::remark ? i.text : name_of(i.kind); }

const char* stream_of(const Issued& i) {
  static const char* streams[] = {"gather",  "reduce",  "reduce", "reduce", "reduce", "compute",
                                  "compute", "compute", "gather", "gather", "compute"};
  return i.kind == Issued::optimizer && i.unit >= 0 ? "reduce" : streams[i.kind];
}

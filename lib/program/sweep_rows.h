// The parts of sweeps.h: the rows of each sweep, and what they are made with. Nothing else includes this.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lib/program/json.h"
#include "lib/program/sweeps.h"

namespace sweep_rows {

using Rows = std::vector<SweepRow>;
using Values = std::vector<int64_t>;

// As find_sweep's names have them, with underscores; `options` is compile_options, `class` class_rows, `trace` traces.
Rows mlp_1024(const SweepMachine& m);
Rows mlp_4096(const SweepMachine& m);
Rows compile_options(const SweepMachine& m);
Rows meta_init(const SweepMachine& m);
Rows recompute(const SweepMachine& m);
Rows seq(const SweepMachine& m);
Rows depth(const SweepMachine& m);
Rows width(const SweepMachine& m);
Rows world(const SweepMachine& m);
Rows global_batch(const SweepMachine& m);
Rows small_params(const SweepMachine& m);
Rows mfu(const SweepMachine& m);
Rows comm(const SweepMachine& m);
Rows nsa_fsdp(const SweepMachine& m);
Rows class_rows(const SweepMachine& m);
Rows precision(const SweepMachine& m);
Rows context(const SweepMachine& m);
Rows knobs(const SweepMachine& m);
Rows graph(const SweepMachine& m);
Rows traces(const SweepMachine& m);
Rows scale(const SweepMachine& m);
Rows losses(const SweepMachine& m);
Rows nsa_loss(const SweepMachine& m);
Rows fp8(const SweepMachine& m);
Rows fp8_loss(const SweepMachine& m);
Rows targets(const SweepMachine& m);
Rows step_shares(const SweepMachine& m);

inline std::string text(int64_t n) { return std::to_string(n); }

// A preset of ./train with these options besides; on a CPU its shape is made small, so that a row takes a second.
enum class Tokens { random, built_in };  // random ones teach nothing, and the loss says nothing
Words shape(const SweepMachine& m, const std::string& preset, const std::string& options = "",
            Tokens tokens = Tokens::random);
inline Values pick(const SweepMachine& m, const Values& on_gpu, const Values& on_cpu) {
  return m.gpu ? on_gpu : on_cpu;
}
inline std::string if_gpu(const SweepMachine& m, const char* options) { return m.gpu ? options : ""; }

}  // namespace sweep_rows

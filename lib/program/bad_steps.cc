#include "lib/program/bad_steps.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "lib/comm/world.h"

using ll = long long;

int first_bad_unit(const std::vector<Unit>& units, const double* sums) {
  for (int u = int(units.size()) - 1; u >= 0; u--)
    if (units[size_t(u)].trained() && !std::isfinite(sums[u])) return u;
  return -1;
}

namespace {
double number(double x) { return std::isnan(x) ? std::fabs(x) : x; }  // without a NaN's sign

// Over all ranks, each of which sees its own shards alone.
std::string whose(const std::vector<Unit>& units, int own) {
  int worst = -1, rank = 0;
  const std::vector<std::string> all = gather_texts(std::to_string(own));
  for (size_t r = 0; r < all.size(); r++)
    if (const int u = std::atoi(all[r].c_str()); u > worst) worst = u, rank = int(r);
  if (worst < 0) return "every unit's gradient is finite by itself";
  return strf("the first in the backward pass that is not finite is the gradient of unit '%s', in the shard of rank %d",
              units[size_t(worst)].name.c_str(), rank);
}
}  // namespace

BadOutput first_on_any_rank(const int32_t* flags, int modules) {
  const int own = int(std::find_if(flags, flags + modules, [](int32_t flag) { return flag != 0; }) - flags);
  BadOutput first;
  const std::vector<std::string> all = gather_texts(std::to_string(own));
  for (size_t r = 0; r < all.size(); r++)
    if (const int m = std::atoi(all[r].c_str()); m < (first.module < 0 ? modules : first.module))
      first.module = m, first.rank = int(r);
  return first;
}

std::string bad_output_text(const ModelConfig& c, const BadOutput& first, const std::string& unit) {
  const int block = c.block_of(first.module);
  std::string part = first.module == 0 ? "the embedding" : "the head's loss";
  if (block >= 0)
    part = strf("%s of block %d", c.attends() && first.module == c.attention_module(block) ? "attention" : "the MLP",
                block);
  return strf("the first in the forward pass that is not finite is the output of unit '%s' (%s) on rank %d",
              unit.c_str(), part.c_str(), first.rank);
}

std::string BadSteps::take(int64_t step, const StepScalars& of, const std::vector<Unit>& units, const double* sums,
                           const std::function<std::string()>& replay,
                           const std::function<void(const std::string&)>& note) {
  if (std::isfinite(of.norm2)) {
    in_a_row_ = 0;
    return "";
  }
  in_a_row_++;
  const int64_t first = (step - 1) * r_.global_batch;
  const bool same_weights = !r_.fsdp.update_in_backward;
  std::string where = same_weights ? replay() : "";
  if (where.empty()) {
    where = whose(units, first_bad_unit(units, sums));
    if (same_weights) where = "its forward pass, run again, is finite; " + where;
  }
  const std::string what = strf(
      "step %lld: the loss is %g, the gradient norm %g: %s; its batch is sequences %lld to %lld in the order of the "
      "data",
      ll(step), number(of.loss / double(r_.tokens_per_step())), number(std::sqrt(of.norm2)), where.c_str(), ll(first),
      ll(first + r_.global_batch - 1));
  if (in_a_row_ <= r_.nan_skips) {
    skipped_++;
    if (this_rank() == 0)
      note(strf("%s; skipped (%lld in a row of at most %lld, %lld in all)", what.c_str(), ll(in_a_row_),
                ll(r_.nan_skips), ll(skipped_)));
    return "";
  }
  std::string end = what + ": the run has diverged";
  if (r_.nan_skips > 0) end += strf(", and --on-nan skips at most %lld in a row", ll(r_.nan_skips));
  else if (r_.fsdp.update_in_backward) end += ", and the weights in memory are lost (--optimizer-in-backward)";
  else end += "; the optimizer did not apply it";
  return end + "; nothing is saved from here on; try a lower --lr, a longer --warmup or --clip";
}

bool BadSteps::save_is_due(int64_t step, const std::function<double()>& norm2,
                           const std::function<void(const std::string&)>& note) {
  const bool due = r_.o.save_every > 0 && step % r_.o.save_every == 0;
  if (!due && !save_waits_) return false;
  if (std::isfinite(norm2())) {
    save_waits_ = false;
    return true;
  }
  if (!std::exchange(save_waits_, true) && this_rank() == 0)
    note(strf("step %lld is not saved: its loss or gradient norm is not finite; a save waits for a step that is good",
              ll(step)));
  return false;
}

// Figures of training: their titles and how they are written.
#include <cmath>

#include "lib/device/error.h"
#include "lib/program/format.h"
#include "lib/program/plan.h"
#include "lib/program/table_parts.h"

using nlohmann::json;

std::string tenths(double v) {
  const long long n = std::llround(10 * v);
  return grouped(n / 10) + strf(".%lld", n % 10);
}
std::string whole(double v) { return grouped(std::llround(v)); }
std::string hundredths(double v) { return strf("%.2f", v); }

namespace {

// The reports give whole milliseconds: no tenths are made up for them.
std::string milliseconds(double v) {
  return v >= 10 && v == std::floor(v) ? whole(v) : v < 10 ? hundredths(v) : tenths(v);
}
std::string percent(double v) { return strf("%.1f %%", 100 * v); }
std::string signed_percent(double v) { return strf("%+.1f %%", 100 * v); }
std::string four_digits(double v) { return strf("%.4f", v); }

// clang-format off
const Figure figures[] = {
    {"init_mib",            "init MiB",                      whole},
    {"before_step_mib",     "pre-step0 MiB",                 whole},
    {"peak_mib",            "peak MiB",                      whole},
    {"planned_peak_mib",    "planned peak MiB",              whole},
    {"reserved_mib",        "reserved MiB",                  whole},
    {"first_peak_mib",      "peak MiB, step 1",              whole},
    {"second_peak_mib",     "peak MiB, step 2",              whole},
    {"step_ms",             "step ms",                       milliseconds},
    {"step_ms_spread",      "step ms, median (min-max)",     milliseconds},
    {"estimated_ms",        "estimated ms",                  milliseconds},
    {"estimate_error",      "error",                         signed_percent},
    {"tokens_per_sec",      "tokens/s",                      whole, "tokens_text"},
    {"tokens_per_sec_gpu",  "tokens/s a GPU",                whole},
    {"mfu",                 "MFU",                           percent},
    {"mfu_flex",            "MFU, flex",                     percent},
    {"mfu_full",            "MFU, attention in full",        percent},
    {"mfu_simple_pytorch",  "MFU by simple_pytorch",         percent},
    {"exposed_ms",          "exposed ms, gather + reduce",   tenths},
    {"exposed_gather_ms",   "exposed gather ms",             tenths},
    {"exposed_reduce_ms",   "exposed reduce ms",             tenths},
    {"first_step_s",        "launch to first step, s",       tenths, "first_step_text"},
    {"gpu_utilization",     "GPU utilization",               percent, "utilization_text"},
    {"nccl_share",          "NCCL's share of GPU time",      percent},
    {"products_ms",         "products ms",                   milliseconds},
    {"products_limit_ms",   "limit ms",                      milliseconds},
    {"products_of_limit",   "times the limit",               hundredths},
    {"attention_ms",        "attention ms",                  milliseconds},
    {"attention_limit_ms",  "limit ms",                      milliseconds},
    {"attention_of_limit",  "times the limit",               hundredths},
    {"memory_bound_ms",     "memory-bound ms",               milliseconds},
    {"memory_bound_limit_ms", "limit ms",                    milliseconds},
    {"memory_bound_of_limit", "times the limit",             hundredths},
    {"waiting_ms",          "waiting ms",                    milliseconds},
    {"clock_mhz",           "clock MHz",                     whole},
    {"power_w",             "power W",                       whole},
    {"kernels",             "kernels",                       whole},
    {"last_loss",           "last loss",                     four_digits},
    {"best_loss",           "best loss",                     four_digits},
    {"mean_loss",           "mean loss",                     four_digits},
    {"tail_loss",           "mean loss of the last tenth",   four_digits},
    {"val_loss",            "validation loss",               four_digits},
};
// clang-format on

}  // namespace

const std::vector<const char*>& figures_of_training() {
  // clang-format off
  static const std::vector<const char*> keys = {
      "init_mib",     "before_step_mib", "first_peak_mib",  "second_peak_mib", "peak_mib",  "planned_peak_mib",
      "reserved_mib", "step_ms_spread",  "estimated_ms",    "tokens_per_sec",  "mfu",       "mfu_simple_pytorch",
      "exposed_ms",   "products_ms",     "products_limit_ms",     "products_of_limit",
      "attention_ms",    "attention_limit_ms",    "attention_of_limit",
      "memory_bound_ms", "memory_bound_limit_ms", "memory_bound_of_limit",           "waiting_ms",
      "first_step_s", "gpu_utilization", "nccl_share",      "clock_mhz",       "power_w",   "kernels",   "last_loss"};
  // clang-format on
  return keys;
}

const Figure* find_figure(const std::string& key) {
  for (const Figure& f : figures)
    if (key == f.key) return &f;
  return nullptr;
}
const Figure& figure_named(const std::string& key) {
  const Figure* f = find_figure(key);
  REQUIRE_USER(f, "a table's figure \"%s\" is not known; `figures` in lib/program/table_figures.cc has those that are",
               key.c_str());
  return *f;
}

// result: of a row, or what a report measured.
std::string text_of(const json& result, const Figure& f) {
  const std::string key = f.key;
  if (key == "exposed_ms")
    return has_number(result, "exposed_gather_ms")
               ? tenths(result["exposed_gather_ms"].get<double>()) + " + " +
                     tenths(has_number(result, "exposed_reduce_ms") ? result["exposed_reduce_ms"].get<double>() : 0)
               : "";
  if (key == "step_ms_spread") {
    if (!has_number(result, "step_ms")) return "";
    std::string text = f.text(result["step_ms"].get<double>());
    if (has_number(result, "step_ms_min") && has_number(result, "step_ms_max"))
      text +=
          " (" + f.text(result["step_ms_min"].get<double>()) + "-" + f.text(result["step_ms_max"].get<double>()) + ")";
    return text;
  }
  if (has_number(result, f.key)) return f.text(result[f.key].get<double>());
  return *f.in_words ? string_of(result, f.in_words) : string_of(result, f.key);
}

bool above_the_report(const json& result) {
  return has_number(result, "peak_mib") && result["peak_mib"].get<double>() + mib(int64_t(reserve())) > report_gpu_mib;
}
std::string footnote() {
  return strf("\n%s more than fits in a GPU of 80 GiB, of which CUDA, cuBLAS and NCCL take %s MiB.\n", dagger,
              whole(mib(int64_t(reserve()))).c_str());
}

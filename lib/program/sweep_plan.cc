#include "lib/program/sweep_plan.h"

#include "lib/program/format.h"
#include "lib/program/plan.h"
#include "lib/program/sweeps.h"

using nlohmann::json;

namespace {

Options parsed(const Words& options, const std::string& chip) {
  Words all = {"./train"};
  all.insert(all.end(), options.begin(), options.end());
  all.push_back("--plan");
  if (!chip.empty()) set_options({"--gpu", chip}, &all);
  else set_options({"--device", "cpu"}, &all);
  std::vector<const char*> argv;
  for (const std::string& word : all) argv.push_back(word.c_str());
  Options o;
  std::string text;
  parse_options(int(argv.size()), argv.data(), &o, &text);
  return o;
}

}  // namespace

Planned planned(const Words& options, int64_t ranks, const std::string& chip_word) {
  const Options o = parsed(options, chip_word);
  const Run r = resolve(o, int(ranks), 0);
  Planned p;
  p.config = settings(r);
  const Chip* chip = chip_word.empty() ? nullptr : chip_named(chip_word);
  if (!chip || r.backend == Backend::cpu) return p;
  const Price price_ = price(r, int(ranks), *chip);
  p.seconds = price_.seconds, p.peak_mib = mib(int64_t(price_.bytes));
  p.init_mib = mib(int64_t(price_.init_bytes)), p.before_step_mib = mib(int64_t(price_.before_step_bytes));
  p.communicators = price_.communicators;
  p.tokens_per_sec = price_.tokens_per_sec * double(ranks);
  p.mfu = mfu(chip->name, 1, flops_per_token(r.model) * price_.tokens_per_sec, 1);
  return p;
}

json resolved(const Words& options, int64_t ranks, const std::string& chip) {
  return settings(resolve(parsed(options, chip), int(ranks), 0));
}

bool fits_on(const Words& options, int64_t ranks, const std::string& chip) {
  const Chip* known = chip_named(chip);
  if (!known) return false;
  try {
    const Planned p = planned(options, ranks, chip);
    return fits(p.peak_mib * (1 << 20), *known, p.communicators);
  } catch (const UsageError&) { return false; }
}

FlopsAs flops_as_others_count(const json& c) {
  const auto number = [&](const char* key) { return c.value(key, 0.0); };
  const double d = number("dim"), f = number("hidden"), L = number("depth"), T = number("seq"), V = number("vocab");
  const std::string arch = c.value("arch", "");
  const bool attends = arch != "mlp";
  const double H = number("heads"), D = c.value("head_dim", d / H), both = D + c.value("v_head_dim", D);
  const double products =
      6 * (L * ((attends ? d * (H + number("kv_heads")) * both : 0) + (arch == "llama" ? 3 : 2) * d * f) + d * V);
  const double half = attends ? 3 * L * H * both * T : 0, ours = products + half;
  const double theirs = L * (24 * d * d + 6 * d * T + 12 * d * (f / d)) + 6 * d * V;
  return {(products + 2 * half) / ours, theirs / ours};
}

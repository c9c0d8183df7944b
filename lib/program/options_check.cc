// Which options go together, as far as the command line alone can tell.
#include "lib/device/error.h"
#include "lib/program/options_parts.h"
#include "lib/program/safetensors.h"

void options_parts::check_combinations(const Options& o) {
  REQUIRE_USER(!o.nsa_stats || !o.log.empty(), "--nsa-stats needs --log FILE to write to");
  REQUIRE_USER(o.mem_dump_every == 0 || !o.diagnostics.empty(), "--mem-dump-every needs --diagnostics DIR to write to");
  REQUIRE_USER(o.save_every == 0 || !o.save.empty(), "--save-every needs --save DIR");
  REQUIRE_USER(!o.gives("keep") || !o.save.empty(), "--keep needs --save DIR");
  REQUIRE_USER(!o.gives("export-shard-mb") || (!o.export_to.empty() && !is_safetensors_name(o.export_to)),
               "--export-shard-mb needs --export DIR; a name that ends in .safetensors is one file");
  REQUIRE_USER(!o.gives("export-dtype") || !o.export_to.empty(), "--export-dtype needs --export PATH");
  REQUIRE_USER(
      !o.gives("max-positions") || !o.save.empty() || (!o.export_to.empty() && !is_safetensors_name(o.export_to)),
      "--max-positions needs --export DIR, whose config.json says it, or --save DIR, to be exported later");
  for (const char* name : {"sample-every", "prompt", "temperature", "top-k"})
    REQUIRE_USER(o.sample > 0 || !o.gives(name), "--%s needs --sample N, the tokens to write", name);
  for (const auto& [option, is_given] : {std::pair("--profile", o.profile), std::pair("--trace", !o.trace.empty())})
    REQUIRE_USER(!is_given || o.minutes == 0, "%s is of the last step, which --minutes leaves open; use --stop-after",
                 option);
  REQUIRE_USER(o.stop_after != 0 || (!o.profile && o.trace.empty()),
               "--stop-after 0 takes no step, so there is nothing for --profile or --trace");
  REQUIRE_USER(o.trace.empty() || o.plan || !o.instead_of_training(), "--trace needs a step: a run, or --plan");
  REQUIRE_USER(o.timeout == 0 || o.timeout >= 2, "--timeout %g: give 2 seconds or more, or 0 for never",
               double(o.timeout));
  REQUIRE_USER(o.tokens == 0 || o.epochs == 0, "--tokens and --epochs both say when to stop; drop one");
  REQUIRE_USER(o.stop_after != 0 || o.save.empty(),
               "--stop-after 0 takes no step, so there is nothing for --save; --export writes the initial weights");
  REQUIRE_USER(o.resume != "latest" || !o.save.empty(), "--resume latest needs --save DIR, whose latest step it is");
  REQUIRE_USER(o.graph == 0 || !o.comm_timing, "--graph 1: a graph cannot be timed from outside; drop --comm-timing");
  REQUIRE_USER(o.graph == 0 || o.gather != "mpi", "--graph 1: a CUDA graph cannot hold MPI calls; drop --gather mpi");
  REQUIRE_USER(o.wrap == "auto" || (o.bucket_mb == 0 && o.wrap_min_params == Options().wrap_min_params),
               "%s needs --wrap auto, which makes units by size", o.bucket_mb ? "--bucket-mb" : "--wrap-min-params");
  const bool keeps = o.shard == "grad" || o.shard == "none";
  REQUIRE_USER(!keeps || o.reshard_after_forward != 1,
               "--shard %s keeps parameters unsharded; --reshard-after-forward 1 needs --shard full or hybrid:K",
               o.shard.c_str());
  REQUIRE_USER(o.limit_all_gathers.empty() || (!keeps && o.reshard_after_forward != 0),
               "--limit-all-gathers: without resharding after the forward every unit has its own slot");
  REQUIRE_USER(!o.gives("backward-prefetch") || (!keeps && o.reshard_after_forward != 0),
               "--backward-prefetch: without resharding after the forward the backward pass gathers nothing");
  REQUIRE_USER(o.world == 0 || o.plan || o.show_schedule || o.show_params,
               "--world is for --plan, --show-schedule and --show-params; a run has the ranks of mpirun -np");
  REQUIRE_USER(o.gpu.empty() || o.plan, "--gpu is for --plan; a run uses the GPUs of its hosts");
}

bool only_one(const std::vector<std::pair<const char*, bool>>& asked) {
  const char* first = nullptr;
  for (const auto& [option, is_given] : asked) {
    REQUIRE_USER(!is_given || !first, "%s and %s: ask for one at a time", first, option);
    if (is_given) first = option;
  }
  return first != nullptr;
}

void check_carried_combinations(const Options& o) {
  for (const char* name : {"val-data", "val-batches"})
    REQUIRE_USER(o.val_every > 0 || !o.gives(name), "--%s needs --val-every STEPS", name);
  REQUIRE_USER(o.optimizer_in_backward == 0 || o.clip == 0,
               "--optimizer-in-backward 1 needs --clip 0: the global norm is known only after the last reduction");
  REQUIRE_USER(o.autocast.empty() || o.param_dtype != "bf16",
               "--autocast bf16 gathers parameters in fp32; drop --param-dtype bf16");
}

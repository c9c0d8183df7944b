// The options of ./train, from the command line (by CLI11), from environment variables (--kv-heads is FSDP_KV_HEADS)
// and from a file (config_file.h); where several name one, the first of these wins. The option table in options.cc is
// the one place where a name, a default, a range and a help text stand; Options is what comes out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nlohmann/json_fwd.hpp"

#include "nsa_attention.h"

struct Options {
  // Model. The preset fills what the command line leaves at 0 or empty.
  std::string preset;  // empty: chosen by the machine
  std::string arch;    // simple, rope, llama, mlp
  int64_t dim = 0, depth = 0, heads = 0, kv_heads = 0, head_dim = 0, v_head_dim = 0, hidden = 0, vocab = 0, seq = 0;
  double rope_base = 500000, norm_eps = 1e-5;
  std::string rope_scaling = "none";  // or llama3:FACTOR:LOW:HIGH:ORIGINAL_SEQ
  bool tie_embeddings = false;
  std::string freeze;  // beginnings of names, with commas
  // Attention.
  std::string attn;  // nsa or dense; empty: nsa where the architecture attends
  int64_t nsa_block = nsa_defaults.block, nsa_stride = nsa_defaults.stride,
          nsa_select_block = nsa_defaults.select_block;
  int64_t nsa_selected = nsa_defaults.selected, nsa_window = nsa_defaults.window;
  std::string nsa_phi = "mean", nsa_gate = "linear";
  // Batch.
  int64_t batch = 0;         // sequences a rank and micro-batch
  int64_t global_batch = 0;  // sequences in all a step; 0: batch * ranks * grad_accum
  int64_t grad_accum = 1;
  // Optimizer and schedule.
  double lr = 3e-4, min_lr_ratio = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, clip = 1.0;
  std::string clip_norm = "2";
  std::string on_nan = "stop";  // or skip, skip:K
  int64_t warmup = -1;          // steps; -1: a tenth of the steps, 100 at most
  int64_t steps = 0;            // the schedule's length; 0: chosen by the machine
  int64_t stop_after = -1;      // end after this many steps without changing the schedule; -1: at its end
  int64_t tokens = 0;           // end after this many tokens; sets the schedule where --steps does not
  double epochs = 0;            // the same for passes over the data
  double minutes = 0;           // end after this much time
  int64_t val_every = 0, val_batches = 4;
  uint64_t seed = 0;
  // Data.
  std::string data;      // text or token files; empty: the built-in synthetic corpus; "random": uniform tokens
  std::string val_data;  // empty: the last tenth of the data
  // Evaluation and samples.
  std::string eval;                      // text, tokens or questions; empty: none
  int64_t sample = 0, sample_every = 0;  // tokens; steps, 0: at the end alone
  std::string prompt;                    // empty: what begins a document
  double temperature = 0.8;
  int64_t top_k = 0;
  // Numbers.
  std::string param_dtype;   // bf16 or fp32; empty: bf16 on a GPU, fp32 on a CPU
  std::string reduce_dtype;  // bf16 or fp32; empty: as param_dtype
  std::string matmul_dtype;  // fp8, of the blocks' weights; empty: as param_dtype
  std::string fp8_scaling = "tensor";
  std::string gather_dtype;  // fp8, of what is multiplied in fp8; empty: as param_dtype
  std::string save_dtype;    // fp8, of what is kept for the backward pass; empty: as param_dtype
  bool tf32 = false;
  std::string autocast;  // bf16: parameters are gathered in fp32 and cast; empty: off
  std::string moments = "fp32";
  // Sharding.
  std::string shard = "full";  // full, grad, none, hybrid:K
  std::string wrap = "block";  // block, sublayer, auto, single
  int64_t wrap_min_params = 100000000, bucket_mb = 0;
  int64_t reshard_after_forward = -1;  // -1: as --shard says
  std::string limit_all_gathers;       // slots, or "off"; empty: 2
  int64_t gradient_slots = 2;
  int64_t forward_prefetch = -1;
  std::string backward_prefetch = "pre";
  std::string accum_sync = "every";
  int64_t replicate_below = 0;  // bytes
  int64_t meta_init = 1, optimizer_in_backward = 0;
  std::string gather;        // nccl, copy-engine, mpi; empty: by the transport
  std::string reduce;        // nccl, copy-engine; empty: by the transport
  std::string reduce_tail;   // peer, same; empty: peer where it is known to pay
  int64_t reduce_ctas = -1;  // -1: by the size of gradients
  // Checkpoints.
  std::string save;        // directory; empty: none
  int64_t save_every = 0;  // steps; 0: at the end alone
  int64_t keep = 2;        // steps that stay; 0: all
  std::string resume;      // a directory, or "latest" of --save
  std::string init;        // a folder with a model (model_folder.h); empty: random weights
  std::string export_to;   // written at the end: a safetensors file, or a folder
  std::string export_dtype = "bf16";
  int64_t export_shard_mb = 4096;
  int64_t max_positions = 0;  // in an exported config.json; 0: seq
  // Memory.
  std::string recompute = "none";  // none, mlp, attn, both, block
  int64_t keep_attention = 0, keep_cheap = 0;
  // Machine.
  std::string device = "auto";  // auto, cpu, gpu
  bool allow_single_rank = false;
  int64_t graph = 0, fuse = 1, tune_matmul = 1;
  double timeout = 60;  // seconds; 0: none
  // Output.
  std::string log;           // JSON lines
  std::string tensorboard;   // directory; empty: none
  bool comm_timing = false;  // measure exposed communication with events
  bool nsa_stats = false;    // log what gates and selection do, and which kernels ran
  bool profile = false;      // where the time of the last step went
  std::string trace;         // file for the last step, or for --plan's
  int64_t log_every = 1;
  // Diagnostics.
  std::string diagnostics;     // directory; empty: none
  int64_t mem_dump_every = 0;  // steps; 0: at the start and at the first step alone
  double stall = 180;          // seconds; 0: nobody watches
  // Instead of training.
  bool list_presets = false;
  std::string completion;  // bash; empty: none
  bool plan = false, show_schedule = false, version = false, hardware = false, show_params = false;
  int64_t world = 0;  // --plan: pretend this many ranks
  std::string gpu;    // --plan: estimate this chip's time; empty: the one here, without one h200

  std::string config;                 // the file that --config named
  std::vector<std::string> given;     // what the command line, the environment or the file names
  std::vector<std::string> warnings;  // of environment variables that look like an option's
  bool keeps_global_batch = false;    // a checkpoint's: --batch only says how it is cut
  bool gives(const std::string& name) const;
  bool instead_of_training() const;  // something is printed, and no rank trains
};

// Parses argv, the environment and --config FILE. Throws UsageError with one line that names the option, variable or
// line of the file, the value and what is allowed. An empty variable is as one that is not set. Returns false when
// --help was asked, of all or of a section: `text` then holds it. Touches no MPI and no device.
bool parse_options(int argc, const char* const* argv, Options* out, std::string* text);
// Refuses what does not go together of options that a checkpoint may bring. parse_options does, but not with --resume:
// whoever takes the checkpoint's options over does so then.
void check_carried_combinations(const Options& o);
std::string completion_script();  // --completion's, for bash
// Whether one of these was asked for. Throws UsageError if two were: a program does one thing at a time.
bool only_one(const std::vector<std::pair<const char*, bool>>& asked);
// Every option as a JSON object, for the log's header and for comparing ranks.
nlohmann::json to_json(const Options& o);
std::string key_of(std::string name);  // there, of an option
// Sets the options of these names, but those that are given, to what to_json said of another run.
void take_over(const nlohmann::json& settings, const std::vector<std::string>& names, Options* o);
// The state of a checkpoint, {"step": N, "options": {...}}, as this program takes it: with a value for every option
// that it has. One that the checkpoint does not name, because it is older, has its default, and null if that was chosen
// by the machine or the preset. "data_files": [{"file": NAME, "tokens": N}, ...] and "tokens": {"vocab": N,
// "tokenizer": NAME} may stand beside them. Throws UsageError that names `file` and the key of a value of another type.
nlohmann::json read_state(const nlohmann::json& state, const std::string& file);
// Whether a file may say that of the option of this name: empty, or what it may ("a whole number from 1 to 64").
std::string option_allows(const std::string& name, const nlohmann::json& value);
// What --config reads: a line for every option that is not at its default.
std::string to_config(const Options& o);

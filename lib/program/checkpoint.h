// Checkpoints: written beside the training, read back at any number of ranks.
//
//   DIR/step-20/rank-0.bin ...   a rank's weights and moments: fp32 (moments perhaps bf16), little endian, part
//                                behind part
//   DIR/step-20/manifest.json    what lies where, sizes and checksums, and the run's state (step, data position, seed,
//                                configuration); its own checksum covers every byte of it
//   DIR/latest -> step-20
//
// A part is a piece of one tensor, known by the tensor's name and the piece's place in it. How the tensors were dealt
// out over units and ranks when they were saved is therefore no part of a checkpoint: a load asks for the parts that it
// needs and reads the pieces of whatever files they lie in. Same ranks and layout: the run goes on bit for bit.
//
// A step is valid if it has its name, and it gets its name last. In order: every rank writes and flushes its file in
// DIR/.tmp-step-20; rank 0, when all have, the manifest; it flushes the directory, renames it, flushes DIR, moves
// `latest`, flushes DIR, and only then deletes old steps. So a process that is killed, a machine that goes down, or a
// disk that fills up, at any moment, leaves the step before it intact. What such a save left in .tmp-step-20, or in
// .tmp-old-step-10 while that was deleted, is removed at the next start. Nothing else in DIR is touched: it may hold
// files of the user's. All ranks must see DIR. One run at a time may save to it: a lock on the directory, which goes
// with the process, keeps others out where its file system has locks, and where it has none a step that appears and is
// not this run's ends the save.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lib/comm/comm.h"
#include "lib/device/device.h"
#include "lib/device/halves.h"
#include "lib/program/checkpoint_directory.h"
#include "lib/program/json.h"

// Elements [first, first + count) of a tensor, at `data`, on the device or the host. A list of parts has one for every
// tensor of the model and each kind, of no elements where this rank has none: so every rank knows all tensors.
struct Part {
  std::string tensor;
  const char* kind;            // "weight", or AdamW's moments, "m" and "v"
  std::vector<int64_t> shape;  // of the tensor, unsharded
  int64_t first, count;
  char* data;
  Dtype dtype;           // f32 or bf16
  char* rest = nullptr;  // f32 in halves: `data` has the upper ones, and this the lower
  int64_t bytes() const { return count * size_of(dtype); }
};
// Numbers [at, at + n) of a part to the host, enqueued on a stream: halves one behind the other, n of each. When they
// are there, joined() finds numbers [at, at + n) of the `count` that were copied: where they lie, or put together in
// `room` (n numbers).
void copy_to_host(Stream& s, char* to, const Part& p, int64_t at, int64_t n);
const char* joined(const Part& p, const char* host, int64_t count, int64_t at, int64_t n, char* room);
// And back. `numbers` and `room` (n numbers each, pinned) are read when the stream comes to it.
void copy_from_host(Stream& s, const Part& p, int64_t at, int64_t n, const char* numbers, char* room);

// A rank's parts of an Fsdp (or of anything that has its units and shards); and those that it saves, without what
// another replica does.
enum class Replicas { all, first };
template <class F>
std::vector<Part> parts_of(const F& fsdp, Replicas of = Replicas::all) {
  std::vector<Part> parts;
  for (size_t i = 0; i < fsdp.units().size(); i++) {
    const auto& unit = fsdp.units()[i];
    const int u = int(i);
    const bool mine = of == Replicas::all || fsdp.first_replica(u);
    // Kind by kind, as they lie in memory: what follows each other, and is not in halves, is copied in one go.
    const Masters master = fsdp.master(u);
    struct {
      const char* name;
      void* data;
      Dtype dtype;
    } kinds[] = {{"weight", master.whole, Dtype::f32},
                 {"m", fsdp.first_moment(u), fsdp.moment_dtype()},
                 {"v", fsdp.second_moment(u), fsdp.moment_dtype()}};
    for (const auto& kind : kinds)
      for (const auto& p : unit.params) {
        if (p.frozen && kind.name != kinds[0].name) continue;
        const auto piece = unit.piece(p, fsdp.shard_rank(u));
        if (!mine || piece.numel == 0) {
          parts.push_back({p.name, kind.name, p.shape, 0, 0, nullptr, kind.dtype});
          continue;
        }
        const bool in_halves = !kind.data;
        const Halves halves = master.halves + piece.offset_in_shard;
        char* at = in_halves ? reinterpret_cast<char*>(halves.high)
                             : static_cast<char*>(kind.data) + piece.offset_in_shard * size_of(kind.dtype);
        parts.push_back({p.name, kind.name, p.shape, piece.first, piece.numel, at, kind.dtype,
                         in_halves ? reinterpret_cast<char*>(halves.rest) : nullptr});
      }
  }
  return parts;
}
template <class F>
std::vector<Part> parts_to_save(const F& fsdp) {
  return parts_of(fsdp, Replicas::first);
}

// ----------------------------------------------------------------------------------------------------------- saving

// What becomes of the steps saved before when another one is.
enum class OlderSteps { rotate, stay };  // rotate: those beyond --keep go

// Copies the parts aside and writes them from a thread. Takes host memory for one copy of the parts (pinned on a GPU;
// 12 bytes for each parameter of the shard), once, when it is made.
class Saver {
 public:
  // Collective. keep: how many steps stay, 0: all. note: says something to the user; called on rank 0, from begin(),
  // check() and finish(). Throws UsageError, the same on all ranks, if there is no memory for the copy. Parts stay
  // where they are for the Saver's life.
  Saver(Device& dev, const World& world, SaveDirectory to, int64_t keep, std::vector<Part> parts,
        std::function<void(const std::string&)> note = nullptr);
  // Waits for the save that is being written. While an exception unwinds it gives the save up instead, because the
  // other ranks may never come to its end.
  ~Saver();
  Saver(const Saver&) = delete;

  // Enqueues the copies behind the compute stream's work, on a stream of their own, and returns. Nobody may change the
  // parts before copied() has passed (Fsdp::hold_updates). All ranks call it for the same steps. If the save before is
  // still being written it waits for that, and says so. `state` is kept in the manifest as it is. Weights that are not
  // finite are not saved: that is an error, and the steps before stay.
  void begin(int64_t step, const nlohmann::json& state, OlderSteps older = OlderSteps::rotate);
  const Event& copied() const { return copied_; }
  double delay_ms = 0;  // for tests: sleeps before the copies
  // Collective; does not wait for a disk. Whether the save before is written on all ranks. If not, says that `step` is
  // not to be saved.
  bool idle(int64_t step);
  // At every step boundary; does not wait. A save that failed on any rank for the disk's sake is a note, once, and the
  // next save is another try. What else went wrong (weights that are not finite, another run in DIR) makes this throw
  // Error on rank 0 (begin and finish too), so that it is said once; or_abort then ends the other ranks, on which
  // nothing is thrown. The failed step leaves nothing behind, and the steps before it stay.
  void check();
  // Waits for the save that is being written. Returns why the latest save failed, the same on all ranks, or nothing.
  std::string finish();

 private:
  void write(int64_t step, const std::string& state, OlderSteps older);
  void report();

  Device& dev_;
  World world_;
  SaveDirectory to_;
  int64_t keep_;
  std::vector<Part> parts_;
  std::function<void(const std::string&)> note_;
  TextChannel talk_;  // the writers'
  TextChannel ask_;
  std::unique_ptr<HostBuffer<char>> copy_;
  Stream copies_;  // beside the compute stream
  Event begun_, copied_;
  std::thread writer_;
  // The writer's until busy_ is false again.
  std::atomic<bool> busy_{false};
  std::string error_, failed_;  // failed_: the latest save, for the disk's sake
  std::vector<std::string> notes_;
  int64_t step_ = 0, told_ = -1;
  std::set<std::string> said_;  // rank 0's notes
};

// Begins a save of an Fsdp's parts: they are copied beside the next step's forward and backward pass, and its updates
// wait for that.
template <class F>
void begin_save(Saver* saver, F* fsdp, int64_t step, const nlohmann::json& state,
                OlderSteps older = OlderSteps::rotate) {
  saver->begin(step, state, older);
  fsdp->hold_updates(saver->copied());
}

// ---------------------------------------------------------------------------------------------------------- loading

// The state that was given to begin(), from a manifest that has been checked with the sizes of all files. Collective.
struct SavedState {
  std::string step_dir;  // where it is from: what another run saves meanwhile is not what goes on
  nlohmann::json state;
};
SavedState load_state(const std::string& resume, const std::string& save_dir, const World& world);

// Fills in the parts and returns the state. Reads what the parts need and checks it against its checksums, chunk by
// chunk. Collective, in Mode::run; waits for the compute stream. Padding in the shards is left alone (init_weights
// clears it), and so are gathered copies: load before the first gather. Left alone too are moments of tensors that were
// saved without, because they were frozen: `note` is told, on rank 0. Throws UsageError, the same on all ranks,
// naming file, tensor and rank: a damaged, missing or truncated file; a tensor that the model or the checkpoint lacks;
// another shape. The parts' contents are then undefined.
nlohmann::json load_checkpoint(const std::string& resume, const std::string& save_dir, Device& dev, const World& world,
                               const std::vector<Part>& parts, std::function<void(const std::string&)> note = nullptr);

// -------------------------------------------------------------------------------- what a save is made of (and tests)

// The first of `count` weights in fp32 that is not finite, if there is one.
struct NotFinite {
  int64_t place;
  double value;
};
std::optional<NotFinite> not_finite(const char* weights, int64_t count);
// Throws Error that names the first of these weights of a tensor, numbers `first` on of fp32, that is not finite.
void require_finite(const std::string& tensor, const char* weights, int64_t first, int64_t count);
// A rank's file, from `bytes`: its parts, one behind the other, each as copy_to_host leaves it. Returns its entry in
// the manifest.
std::string write_shard(const std::string& dir, int64_t step, int rank, const std::vector<Part>& parts,
                        const char* bytes);
// All that rank 0 does after that. Returns what a user should be told though nothing is lost.
std::vector<std::string> publish(const std::string& dir, int64_t step, int64_t keep,
                                 const std::vector<std::string>& shards, const std::vector<Part>& parts,
                                 const std::string& state);

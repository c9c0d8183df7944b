// Planned memory: a step's buffers without an allocator in the step.
//
// The program is first run with the kernels off (Mode::plan): Memory records when each buffer is born and dies.
// commit() packs them into one arena. Afterwards the same calls, in the same order, hand out the planned addresses, and
// anything else is an error.
//
//   auto step = [&] {
//     dev.mem.begin("step");
//     auto x = dev.mem.take<float>(n, "x");  // a Buffer, given back where it goes out of scope
//     ops::fill(dev.compute(), x, n);        // Mode::plan: enqueues nothing
//     x.reset();                             // or earlier
//     dev.mem.end();
//   };
//   float* w = dev.mem.keep<float>(n, "w", Purpose::master);
//   step();  // records
//   dev.mem.commit(), dev.mem.rewind(), dev.mode = Mode::run;
//   w = dev.mem.keep<float>(n, "w", Purpose::master);  // the real address
//   step();  // runs
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

struct Device;

enum class Purpose { master, moments, gradients, gather_slots, gradient_slots, activations, temporaries, workspace };
constexpr int purposes = 8;
const char* name_of(Purpose p);

// One buffer's life: born and dead count the takes and gives of its program; [born, dead) is when it is live.
struct Life {
  int64_t bytes, born, dead;
};
// Offsets for buffers such that no two that are live together overlap; deterministic. Offsets and the total are
// multiples of `align`. Returns the total; at least the largest sum of (aligned) bytes live at one time.
int64_t pack(const std::vector<Life>& lives, int64_t align, std::vector<int64_t>* offsets);
int64_t most_live(const std::vector<Life>& lives, int64_t align);

struct MemoryReport {
  int64_t init[purposes], before_step[purposes], peak[purposes];  // bytes live: while the model is made, before the
                                                                  // first step, and at the peak
  int64_t init_total, before_step_total, live_peak, arena;        // arena >= live_peak: packing and alignment
  std::string peak_phase, largest;                                // where the peak falls; the largest buffer in it
};

// Whether an arena fits: what it asks for, what must stay free beside it for the libraries that take memory later
// (library_bytes() of lib/comm), and what is free. Bytes.
struct Room {
  int64_t arena, reserve = 0;
  int64_t free_at_start, free_now;  // of the device; by now some that share it may have taken theirs
  int sharers = 1;                  // each with an arena and a reserve like this
  bool fits() const { return (arena + reserve) * sharers <= free_at_start && arena + reserve <= free_now; }
};

class Memory;

// Owns one planned buffer; gives it back when it goes out of scope.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Memory* m, T* p, int64_t n) : m_(m), p_(p), n_(n) {}
  Buffer(Buffer&& o) noexcept { *this = std::move(o); }
  Buffer& operator=(Buffer&& o) noexcept;
  ~Buffer() { reset(); }
  void reset();
  T* get() const { return p_; }
  operator T*() const { return p_; }
  int64_t size() const { return n_; }

 private:
  Memory* m_ = nullptr;
  T* p_ = nullptr;
  int64_t n_ = 0;
};

class Memory {
 public:
  explicit Memory(Device& dev) : dev_(dev) {}
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // For the life of the program. Call in the same order when planning and after commit(); `rewind()` between the two.
  template <class T>
  T* keep(int64_t n, const std::string& name, Purpose p) {
    return static_cast<T*>(keep_bytes(n * int64_t(sizeof(T)), name, p));
  }
  // Between begin(program) and end(). A buffer belongs to the compute stream; other streams may touch it only behind
  // an event that the compute stream recorded after the take and waited for before the give.
  template <class T>
  Buffer<T> take(int64_t n, const char* name, Purpose p = Purpose::temporaries) {
    return Buffer<T>(this, static_cast<T*>(take_bytes(n * int64_t(sizeof(T)), name, p)), n);
  }
  // "step", "validate": each has its own trace, all share the arena. The first time it is recorded, then followed.
  void begin(const std::string& program);
  void end();
  // Within a program: a part that is run several times. It is recorded the first time, and followed every time behind
  // that, in the same dry run too. It gives back what it takes. One for each program.
  void begin_repeat();
  void end_repeat();
  void phase(const std::string& name);  // names what follows, for the report and for errors

  void poison();  // for tests: fills all that is not kept with NaN patterns
  // Packs, checks against the free memory of the device, `reserve` bytes of which stay free (OutOfMemory), and
  // allocates the arena.
  void commit(int64_t reserve = 0);
  void rewind();  // keep() starts again from its first buffer
  bool committed() const { return base_ != nullptr; }
  char* base() const { return base_; }
  // Who gives the arena, where it is not cudaMalloc; free takes what allocate returned. Set before commit().
  std::function<void*(int64_t)> allocate;
  std::function<void(void*)> free;
  MemoryReport report() const;                                        // planning or after commit
  int64_t live_peak() const;                                          // report's; packs nothing
  int64_t arena_bytes() const;                                        // packs if need be; what commit() allocates
  int64_t device_reported_bytes() const { return device_reported_; }  // what the device says the arena took

 private:
  template <class T>
  friend class Buffer;
  struct Buf {
    std::string name;
    Purpose purpose;
    int64_t bytes, born, dead, offset;
    std::string phase;
  };
  struct Program {
    std::string name;
    std::vector<Buf> bufs;
    int64_t clock = 0;
    bool recorded = false;
    std::vector<int> order;                    // take: index of the buffer; give: ~index
    int64_t repeat_from = -1, repeat_to = -1;  // places in the order; -1: nothing is run again
  };
  void* keep_bytes(int64_t bytes, const std::string& name, Purpose p);
  void* take_bytes(int64_t bytes, const char* name, Purpose p);
  void give(void* p);
  void pack_all() const;
  MemoryReport live_report() const;  // without the arena
  bool records(const Program& p) const { return !p.recorded && !(repeating_ && p.repeat_to >= 0); }
  std::string no_room(const Room& room) const;

  Device& dev_;
  std::vector<Buf> kept_;
  size_t next_kept_ = 0;
  mutable std::vector<Program> programs_;
  int current_ = -1;
  size_t cursor_ = 0;
  bool repeating_ = false;
  size_t live_before_repeat_ = 0;
  std::unordered_map<const void*, int> live_;  // address -> buffer, of the current program
  std::string phase_;
  char* base_ = nullptr;
  mutable int64_t arena_ = -1, kept_bytes_ = 0;
  int64_t device_reported_ = 0;
};

template <class T>
Buffer<T>& Buffer<T>::operator=(Buffer&& o) noexcept {
  if (this != &o) {
    reset();
    m_ = o.m_, p_ = o.p_, n_ = o.n_;
    o.m_ = nullptr, o.p_ = nullptr, o.n_ = 0;
  }
  return *this;
}
template <class T>
void Buffer<T>::reset() {
  if (p_) m_->give(p_);
  m_ = nullptr, p_ = nullptr, n_ = 0;
}

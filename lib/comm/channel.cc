#include "lib/comm/channel.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "lib/comm/flight.h"
#include "lib/comm/mpi_calls.h"
#include "lib/comm/peers.h"
#include "lib/comm/progress.h"
#include "lib/comm/watchdog.h"

#ifndef FSDP_NCCL
#define FSDP_NCCL 0
#endif
#if FSDP_NCCL
#include <nccl.h>
#endif

namespace {
#if FSDP_NCCL
void check_nccl(ncclResult_t code, const char* call, int line, ncclComm_t comm) {
  if (code == ncclSuccess) return;
  const char* last = ncclGetLastError(comm);
  throw NcclError(strf("NCCL: %s failed at %s:%d on rank %d: %s: %s; NCCL_DEBUG=INFO says more", call, __FILE__, line,
                       this_rank(), ncclGetErrorString(code), last ? last : ""));
}
#define NCCL_CHECK(call, comm) check_nccl((call), #call, __LINE__, comm)
#endif

// MPI counts are ints: a part of any size is some number of equal pieces, described to MPI as one type.
struct Part {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  int count = 0;
  explicit Part(int64_t bytes) {
    int64_t piece = 1;
    while (bytes / piece > (int64_t(1) << 30) || (piece < 4096 && bytes % (piece * 2) == 0)) {
      if (bytes % (piece * 2)) throw MpiError(strf("a part of %lld bytes is too large for MPI", (long long)bytes));
      piece *= 2;
    }
    MPI_CHECK(MPI_Type_contiguous(int(piece), MPI_BYTE, &type));
    MPI_CHECK(MPI_Type_commit(&type));
    count = int(bytes / piece);
  }
  ~Part() { MPI_Type_free(&type); }
};

// send, receive: a part for each rank, and from each.
void exchange(const char* send, char* receive, int64_t part, MPI_Comm mpi) {
  Part p(part);
  MPI_Request request;
  MPI_CHECK(MPI_Ialltoall(send, p.count, p.type, receive, p.count, p.type, mpi, &request));
  finish(&request);
}

// to[i] = sum over ranks of parts[r*count + i], in rank order.
template <class T, class A>
void sum_parts(T* to, const T* parts, int64_t count, int ranks) {
  constexpr int64_t tile = 1024;
  A sum[tile];
  for (int64_t at = 0; at < count; at += tile) {
    int64_t n = count - at < tile ? count - at : tile;
    for (int64_t i = 0; i < n; i++) sum[i] = A(parts[at + i]);
    for (int r = 1; r < ranks; r++)
      for (int64_t i = 0; i < n; i++) sum[i] += A(parts[r * count + at + i]);
    for (int64_t i = 0; i < n; i++) to[at + i] = T(sum[i]);
  }
}

// The largest of each; not a number if one is none.
template <class E>
void max_parts(E* to, const E* parts, int64_t count, int ranks) {
  for (int64_t i = 0; i < count; i++)
    for (int r = 0; r < ranks; r++)
      if (const E x = parts[r * count + i]; r == 0 || x > to[i] || x != x) to[i] = x;
}
void sum_parts(void* to, const void* parts, int64_t count, int ranks, Dtype t) {
  if (t == Dtype::f32) sum_parts<float, float>(static_cast<float*>(to), static_cast<const float*>(parts), count, ranks);
  else if (t == Dtype::bf16)
    sum_parts<bf16, float>(static_cast<bf16*>(to), static_cast<const bf16*>(parts), count, ranks);
  else sum_parts<double, double>(static_cast<double*>(to), static_cast<const double*>(parts), count, ranks);
}
}  // namespace

const char* name_of(Transport t) {
  return t == Transport::nccl ? "NCCL" : t == Transport::mpi ? "MPI through host memory" : "none (one rank)";
}

std::string nccl_version() {
#if FSDP_NCCL
  int v = 0;
  if (ncclGetVersion(&v) == ncclSuccess) return strf("%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
#endif
  return "none";
}

int64_t library_bytes(Backend backend, Transport transport, int communicators) {
  if (backend == Backend::cpu) return 0;
  const int of_nccl = transport == Transport::nccl ? std::max(communicators, usual_communicators) : 0;
  return int64_t(256 + 256 * of_nccl) << 20;
}

CommStreams comm_streams(Backend backend, Transport transport) {
  return backend == Backend::gpu && transport == Transport::mpi ? CommStreams::one : CommStreams::two;
}

#if FSDP_NCCL && NCCL_VERSION_CODE >= 22800
#define COPY_ENGINES 1
#else
#define COPY_ENGINES 0
#endif

void use_nccl_memory(Device& dev) {
#if COPY_ENGINES
  dev.mem.allocate = [](int64_t bytes) {
    void* p = nullptr;
    NCCL_CHECK(ncclMemAlloc(&p, size_t(bytes)), nullptr);
    return p;
  };
  dev.mem.free = [](void* p) { ncclMemFree(p); };
#else
  (void)dev;
  throw UsageError("--gather copy-engine and --reduce copy-engine need NCCL 2.28 or newer; this build has " +
                   nccl_version());
#endif
}

bool copy_engines_pay(const Device& dev, const World& world) {
#if COPY_ENGINES
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess || version < NCCL_VERSION(2, 28, 3)) return false;
  bool all = dev.backend == Backend::gpu && dev.compute_capability >= 90 && gpu_count() >= world.local_size &&
             Graph::can_know_nodes();  // see open_window
  for (int other = 0; all && other < gpu_count(); other++) {
    int reached = other == dev.ordinal;
    if (!reached) CUDA_CHECK(cudaDeviceCanAccessPeer(&reached, dev.ordinal, other));
    all = reached;
  }
  return all;
#else
  (void)dev, (void)world;
  return false;
#endif
}

struct Channel::Impl {
  MPI_Comm mpi = MPI_COMM_NULL;
  char* staging = nullptr;                           // CPU: planned; receives the parts that reduce_scatter sums
  std::unique_ptr<HostBuffer<char>> host, received;  // GPU over MPI: the whole buffer, and the received parts
  int lane = -1;                                     // in the flight record; -1: none
  int watched = -1;                                  // by a watchdog, for NCCL's errors
  std::unique_ptr<Progress> progress;                // NCCL's
#if FSDP_NCCL
  ncclComm_t nccl = nullptr;
#endif
#if COPY_ENGINES
  ncclWindow_t window = nullptr;
#endif
};

Channel::Channel(Device& dev, Stream& stream, const World& world, Transport transport, const char* name,
                 ChannelBytes most, Links links, CopyEngines engines, [[maybe_unused]] int most_ctas)
    : dev_(dev),
      stream_(stream),
      world_(world),
      transport_(world.size == 1 ? Transport::none : transport),
      most_(most),
      engines_(engines),
      impl_(std::make_unique<Impl>()) {
  transport = transport_;
  ASSERT(world.size == 1 || transport != Transport::none);
  if (transport == Transport::mpi && dev.backend == Backend::cpu)
    impl_->staging =
        dev.mem.keep<char>(most.received, std::string(name) + " channel: parts received", Purpose::workspace);
  ASSERT(most.received <= most.any);
  if (links == Links::planned || transport == Transport::none) return;
  MPI_CHECK(MPI_Comm_split(all_ranks(), world.group, world.rank, &impl_->mpi));
  MPI_CHECK(MPI_Comm_set_errhandler(impl_->mpi, MPI_ERRORS_RETURN));
  if (transport == Transport::nccl) {
#if FSDP_NCCL
    ncclUniqueId id;
    if (world.rank == 0) NCCL_CHECK(ncclGetUniqueId(&id), nullptr);
    MPI_CHECK(MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, impl_->mpi));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (most_ctas > 0) config.maxCTAs = most_ctas;
#if COPY_ENGINES
    if (engines != CopyEngines::none) config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
#endif
    NCCL_CHECK(ncclCommInitRankConfig(&impl_->nccl, world.size, id, world.rank, &config), nullptr);
    if (engines != CopyEngines::none) open_window();
#else
    throw UsageError("this build has no NCCL: rebuild with NCCL installed");
#endif
  } else if (dev.backend == Backend::gpu) {
    impl_->host = std::make_unique<HostBuffer<char>>(dev, most.any);
    if (most.received > 0) impl_->received = std::make_unique<HostBuffer<char>>(dev, most.received);
  }
  watch(name);
}

int64_t Channel::pinned_bytes() const {
  return (impl_->host ? impl_->host->size() : 0) + (impl_->received ? impl_->received->size() : 0);
}

// All of the arena: its slots lie at the same places on all ranks, whose plans are the same.
void Channel::open_window() {
#if COPY_ENGINES
  const char* without = engines_ == CopyEngines::all_gather ? "--gather nccl" : "--reduce nccl";
  char* base = dev_.mem.base();
  constexpr int64_t count = 256;
  ASSERT(dev_.mem.arena_bytes() >= 2 * count * world_.size * size_of(Dtype::f32));
  // A window cannot be a communicator's first collective.
  NCCL_CHECK(ncclAllReduce(base, base, 1, ncclInt8, ncclSum, impl_->nccl, stream_.cuda()), impl_->nccl);
  CUDA_CHECK(cudaStreamSynchronize(stream_.cuda()));
  const ncclResult_t code = ncclCommWindowRegister(impl_->nccl, base, size_t(dev_.mem.arena_bytes()), &impl_->window,
                                                   NCCL_WIN_COLL_SYMMETRIC);
  if (code != ncclSuccess)
    throw NcclError(
        strf("NCCL: copy engines cannot reach the arena of rank %d (ncclCommWindowRegister: %s); %s does without them",
             this_rank(), ncclGetErrorString(code), without));
  // NCCL may take kernels all the same, and tells nobody: one collective is looked at, and one before it sets NCCL up.
  const Mode mode = std::exchange(dev_.mode, Mode::run);
  auto carry = [&] {
    const char* apart = base + count * world_.size * size_of(Dtype::f32);
    if (engines_ == CopyEngines::all_gather) all_gather(base, count, Dtype::f32, apart);
    else all_to_all(base, base + count * world_.size * size_of(Dtype::f32), count, Dtype::f32);
  };
  carry();
  stream_.synchronize();
  Graph graph(dev_);
  graph.make(carry);
  dev_.mode = mode;
  if (!graph.nodes().known)
    throw NcclError(strf("NCCL: the driver of rank %d cannot tell whether copy engines are used; update it, or use %s",
                         this_rank(), without));
  if (graph.nodes().nccl_kernels > 0)
    throw NcclError(strf("NCCL: %s of rank %d would run on SMs and not on copy engines; %s does without them",
                         engines_ == CopyEngines::all_gather ? "gathers" : "reductions", this_rank(), without));
#endif
}

// Each rank leaves its number, and all read all: what kernels will read must be the others' memory, and in order.
Peers Channel::map_peers(uint32_t* signals) {
  Peers p;
  p.ranks = world_.size, p.rank = world_.rank, p.base = dev_.mem.base(), p.signals = signals;
#if COPY_ENGINES
  ASSERT(impl_->window && world_.size <= most_peers);
  auto unreadable = [&](const std::string& why) {
    return NcclError(strf("NCCL: rank %d cannot read the arenas of its peers: %s; --gather nccl does without",
                          this_rank(), why.c_str()));
  };
  const int reached = peers::map(stream_, impl_->nccl, impl_->window, &p);
  if (reached != world_.size) throw unreadable(strf("it reaches %d of %d", reached, world_.size));
  auto fill = [&](uint32_t x) {
    CUDA_CHECK(cudaMemsetAsync(signals, 0, size_t(peer_signals(p.ranks)) * sizeof x, stream_.cuda()));
    CUDA_CHECK(cudaMemcpyAsync(signals, &x, sizeof x, cudaMemcpyHostToDevice, stream_.cuda()));
  };
  auto meet = [&] {
    NCCL_CHECK(ncclAllReduce(p.own(), p.own(), 1, ncclInt32, ncclSum, impl_->nccl, stream_.cuda()), impl_->nccl);
    CUDA_CHECK(cudaStreamSynchronize(stream_.cuda()));
  };
  fill(uint32_t(p.rank) + 1);
  meet();
  const std::vector<uint32_t> names = peers::read(stream_, p);
  meet();
  fill(0);
  meet();
  for (int r = 0; r < p.ranks; r++)
    if (names[size_t(r)] != uint32_t(r) + 1) throw unreadable(strf("what it reads is not rank %d's", r));
#endif
  return p;
}

// The flight record of a channel over NCCL is made on the device, for a watchdog with a timeout, and there is none
// without one. NCCL's errors are always looked for.
void Channel::watch(const std::string& name) {
  const bool over_nccl = transport_ == Transport::nccl;
  if (!over_nccl || flight::is_polled()) impl_->lane = flight::open_lane(name.c_str());
#if FSDP_NCCL
  if (!over_nccl) return;
  if (impl_->lane >= 0) {
    impl_->progress = std::make_unique<Progress>(dev_, stream_, impl_->lane);
    dev_.on_graph_launch = flight::launch_graph;
  }
  impl_->watched = watch_errors([comm = impl_->nccl, name]() -> std::string {
    ncclResult_t code = ncclSuccess;
    if (ncclCommGetAsyncError(comm, &code) != ncclSuccess || code == ncclSuccess || code == ncclInProgress) return "";
    const char* last = ncclGetLastError(comm);
    return strf("NCCL: asynchronous error on the %s channel: %s: %s", name.c_str(), ncclGetErrorString(code),
                last ? last : "");
  });
#endif
}

// Around what a channel gives NCCL.
class Channel::Recorded {
 public:
  Recorded(Channel& c, const char* what, int64_t bytes) : progress_(c.impl_->progress.get()) {
    if (!progress_) return;
    if (c.dev_.in_graph) flight::issue_in_graph(c.dev_.in_graph, c.impl_->lane, what, c.unit_, bytes);
    else flight::issue(c.impl_->lane, what, c.unit_, bytes);
    progress_->starts();
  }
  ~Recorded() noexcept(false) {
    if (progress_ && std::uncaught_exceptions() == 0) progress_->finishes();
  }
  Recorded(const Recorded&) = delete;

 private:
  Progress* progress_;
};

// A collective's work on the host, in the stream's order. bytes: of all parts.
void Channel::over_mpi(const char* what, int64_t bytes, std::function<void()> work) {
  const int lane = impl_->lane;
  flight::issue(lane, what, unit_, bytes);
  stream_.host([lane, work = std::move(work)] {
    flight::start(lane);
    work();
    flight::finish(lane);
  });
}

Channel::~Channel() {
  if (impl_->watched >= 0) unwatch_errors(impl_->watched);
  if (impl_->lane >= 0) flight::close_lane(impl_->lane);
#if FSDP_NCCL
#if COPY_ENGINES
  if (impl_->window) ncclCommWindowDeregister(impl_->nccl, impl_->window);
#endif
  if (impl_->nccl) ncclCommDestroy(impl_->nccl);
#endif
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (impl_->mpi != MPI_COMM_NULL && !finalized) MPI_Comm_free(&impl_->mpi);
}

#if FSDP_NCCL
namespace {
ncclDataType_t nccl_type(Dtype t) {
  return t == Dtype::bf16 ? ncclBfloat16 : t == Dtype::f32 ? ncclFloat32 : is_fp8(t) ? ncclUint8 : ncclFloat64;
}
}  // namespace
#endif

// Over MPI every collective has the same three steps: bring the bytes to the host (a GPU), talk, take them back.
void Channel::all_gather(void* buf, int64_t count, Dtype t, const void* mine) {
  stream_.sleep(delay_ms);
  if (transport_ == Transport::none && mine) return stream_.copy(buf, mine, count * size_of(t));
  if (stream_.off())
    stream_.spend(Collective::all_gather, double(count * size_of(t)) * world_.size, world_.size, world_.local_size,
                  via(CopyEngines::all_gather));
  if (stream_.off() || transport_ == Transport::none) return;
  const int64_t part = count * size_of(t);
  ASSERT(!impl_->host || part * world_.size <= most_.any);
  char* const place = static_cast<char*>(buf) + world_.rank * part;
#if FSDP_NCCL
  if (transport_ == Transport::nccl) {
    const Recorded recorded(*this, "all_gather", part * world_.size);
    NCCL_CHECK(ncclAllGather(mine ? mine : place, buf, size_t(count), nccl_type(t), impl_->nccl, stream_.cuda()),
               impl_->nccl);
    return;
  }
#endif
  char* host = impl_->host ? impl_->host->get() : static_cast<char*>(buf);
  if (impl_->host) stream_.copy(host + world_.rank * part, mine ? mine : place, part);
  else if (mine) stream_.copy(place, mine, part);
  over_mpi("all_gather", part * world_.size, [host, part, mpi = impl_->mpi] {
    Part p(part);
    MPI_Request request;
    MPI_CHECK(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, host, p.count, p.type, mpi, &request));
    finish(&request);
  });
  if (impl_->host) stream_.copy(buf, host, part * world_.size);
}

// Of each other rank what lies there as `mine` does here, to place(rank). Every rank begins with another one.
template <class F>
void Channel::fetch(const Peers& peers, const void* mine, int64_t bytes, const F& place) {
  for (int i = 1; i < peers.ranks; i++) {
    const int r = (peers.rank + i) % peers.ranks;
    stream_.copy(place(r), peers.of(r, mine), bytes);
  }
}

// A rank's own part goes by a kernel, as it would by the driver's copy, and at last: in front of the engines' copies it
// would be in the way of the first kernel behind what the gather has waited for.
void Channel::all_gather(void* buf, int64_t count, Dtype t, const void* mine, const Peers& peers) {
  stream_.sleep(delay_ms);
  const int64_t part = count * size_of(t);
  if (stream_.off()) {
    stream_.spend(Collective::all_gather, double(part) * world_.size, world_.size, world_.local_size,
                  Via::copy_engines);
    stream_.spend({Work::memory, 2.0 * double(part)});
    return;
  }
  char* const to = static_cast<char*>(buf);
  fetch(peers, mine, part, [&](int r) { return to + r * part; });
  stream_.copy_by_kernel(to + peers.rank * part, mine, part);
}

void Channel::reduce_scatter(void* buf, int64_t count, Dtype t) {
  stream_.sleep(delay_ms);
  if (stream_.off())
    stream_.spend(Collective::reduce_scatter, double(count * size_of(t)) * world_.size, world_.size, world_.local_size);
  if (stream_.off() || transport_ == Transport::none) return;
  int64_t part = count * size_of(t);
  ASSERT(transport_ != Transport::mpi || part * world_.size <= most_.received);
  char* mine = static_cast<char*>(buf) + world_.rank * part;
#if FSDP_NCCL
  if (transport_ == Transport::nccl) {
    const Recorded recorded(*this, "reduce_scatter", part * world_.size);
    NCCL_CHECK(ncclReduceScatter(buf, mine, size_t(count), nccl_type(t), ncclSum, impl_->nccl, stream_.cuda()),
               impl_->nccl);
    return;
  }
#endif
  bool staged = impl_->host != nullptr;
  char* send = staged ? impl_->host->get() : static_cast<char*>(buf);
  char* parts = staged ? impl_->received->get() : impl_->staging;
  if (staged) stream_.copy(send, buf, part * world_.size);
  char* out = send + world_.rank * part;
  over_mpi("reduce_scatter", part * world_.size, [=, ranks = world_.size, mpi = impl_->mpi] {
    exchange(send, parts, part, mpi);
    sum_parts(out, parts, count, ranks, t);
  });
  if (staged) stream_.copy(mine, out, part);
}

void Channel::by_callers_kernels(Collective what, Via via, const char* name, int64_t bytes,
                                 const std::function<void()>& work) {
  stream_.sleep(delay_ms);
  if (stream_.off()) return stream_.spend(what, double(bytes), world_.size, world_.local_size, via);
  const Recorded recorded(*this, name, bytes);
  work();
}
void Channel::reduce_scatter(int64_t bytes, const std::function<void()>& work) {
  by_callers_kernels(Collective::reduce_scatter, Via::kernels, "reduce_scatter", bytes, work);
}
void Channel::all_reduce(int64_t bytes, const std::function<void()>& work) {
  by_callers_kernels(Collective::all_reduce, Via::kernels, "all_reduce", bytes, work);
}
void Channel::all_to_all(const void* mine, int64_t count, Dtype t, const Peers& peers,
                         const std::function<void()>& meet, void* others, int64_t most,
                         const std::function<void(int64_t first, int64_t n)>& use) {
  const int64_t element = size_of(t);
  int64_t first = 0;
  const auto here = [&] { return std::min(most, count - first); };
  by_callers_kernels(Collective::all_to_all, Via::copy_engines, "all_to_all", count * element * world_.size, [&] {
    meet();
    for (;; first += most) {
      const int64_t piece = here() * element;
      fetch(peers, static_cast<const char*>(mine) + first * element, piece,
            [&](int r) { return static_cast<char*>(others) + among_others(r, peers.rank) * piece; });
      if (first + most >= count) return meet();
      use(first, most);
    }
  });
  for (; first < count; first += most) use(first, here());  // the last piece, and of a plan all
}
// In a plan a kernel that moves nothing.
void Channel::barrier(const std::function<void()>& work) {
  stream_.sleep(delay_ms);
  if (stream_.off()) return stream_.spend({Work::memory, 0});
  const Recorded recorded(*this, "barrier", 0);
  work();
}

// A rank's own part is copied too, and that is a kernel where the driver makes it one.
void Channel::all_to_all(const void* from, void* to, int64_t count, Dtype t) {
  stream_.sleep(delay_ms);
  const int64_t part = count * size_of(t), all = part * world_.size;
  if (transport_ == Transport::none) return stream_.copy(to, from, part);
  if (stream_.off()) {
    stream_.spend({Work::memory, 2.0 * double(part)});
    stream_.spend(Collective::all_to_all, double(all), world_.size, world_.local_size, via(CopyEngines::all_to_all));
    return;
  }
#if FSDP_NCCL
  if (transport_ == Transport::nccl) {
#if COPY_ENGINES
    const Recorded recorded(*this, "all_to_all", all);
    NCCL_CHECK(ncclAlltoAll(from, to, size_t(count), nccl_type(t), impl_->nccl, stream_.cuda()), impl_->nccl);
    return;
#else
    throw UsageError("NCCL " + nccl_version() + " has no all_to_all");
#endif
  }
#endif
  ASSERT(!impl_->host || all <= most_.received);
  char* send = impl_->host ? impl_->host->get() : nullptr;
  char* receive = impl_->host ? impl_->received->get() : static_cast<char*>(to);
  if (send) stream_.copy(send, from, all);
  over_mpi("all_to_all", all, [=, sent = send ? send : static_cast<const char*>(from), mpi = impl_->mpi] {
    exchange(sent, receive, part, mpi);
  });
  if (send) stream_.copy(to, receive, all);
}

// Over MPI in pieces, of which every rank's fit into the staging memory together.
void Channel::all_reduce(void* buf, int64_t count, Dtype t, Reduction how) {
  stream_.sleep(delay_ms);
  ASSERT(how == sum || t == Dtype::f64 || t == Dtype::f32);
  if (stream_.off()) stream_.spend(Collective::all_reduce, double(count * size_of(t)), world_.size, world_.local_size);
  if (stream_.off() || transport_ == Transport::none) return;
#if FSDP_NCCL
  if (transport_ == Transport::nccl) {
    const Recorded recorded(*this, "all_reduce", count * size_of(t));
    NCCL_CHECK(ncclAllReduce(buf, buf, size_t(count), nccl_type(t), how == sum ? ncclSum : ncclMax, impl_->nccl,
                             stream_.cuda()),
               impl_->nccl);
    return;
  }
#endif
  const bool staged = impl_->host != nullptr;
  const int64_t most = most_.received;
  const int64_t piece = std::max<int64_t>(1, most / world_.size / size_of(t) / piece_numbers * piece_numbers);
  ASSERT(piece * world_.size * size_of(t) <= most);
  char* parts = staged ? impl_->received->get() : impl_->staging;
  for (int64_t from = 0; from < count; from += piece) {
    const int64_t n = std::min(piece, count - from), bytes = n * size_of(t);
    char* at = static_cast<char*>(buf) + from * size_of(t);
    char* host = staged ? impl_->host->get() : at;
    if (staged) stream_.copy(host, at, bytes);
    over_mpi("all_reduce", bytes, [=, ranks = world_.size, mpi = impl_->mpi] {
      Part p(bytes);
      MPI_Request request;
      MPI_CHECK(MPI_Iallgather(host, p.count, p.type, parts, p.count, p.type, mpi, &request));
      finish(&request);
      if (how == sum) {
        sum_parts(host, parts, n, ranks, t);
      } else if (t == Dtype::f32) {
        max_parts(reinterpret_cast<float*>(host), reinterpret_cast<const float*>(parts), n, ranks);
      } else {
        max_parts(reinterpret_cast<double*>(host), reinterpret_cast<const double*>(parts), n, ranks);
      }
    });
    if (staged) stream_.copy(at, host, bytes);
  }
}

void Channel::broadcast(void* buf, int64_t bytes, int root) {
  stream_.sleep(delay_ms);
  if (stream_.off()) stream_.spend(Collective::broadcast, double(bytes), world_.size, world_.local_size);
  if (stream_.off() || transport_ == Transport::none) return;
#if FSDP_NCCL
  if (transport_ == Transport::nccl) {
    const Recorded recorded(*this, "broadcast", bytes);
    NCCL_CHECK(ncclBroadcast(buf, buf, size_t(bytes), ncclInt8, root, impl_->nccl, stream_.cuda()), impl_->nccl);
    return;
  }
#endif
  ASSERT(!impl_->host || bytes <= most_.any);
  char* host = impl_->host ? impl_->host->get() : static_cast<char*>(buf);
  if (impl_->host) stream_.copy(host, buf, bytes);
  over_mpi("broadcast", bytes, [host, bytes, root, mpi = impl_->mpi] {
    Part p(bytes);
    MPI_Request request;
    MPI_CHECK(MPI_Ibcast(host, p.count, p.type, root, mpi, &request));
    finish(&request);
  });
  if (impl_->host) stream_.copy(buf, host, bytes);
}

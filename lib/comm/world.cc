#include "lib/comm/world.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <set>
#include <sstream>
#include <thread>

#include "lib/comm/flight.h"
#include "lib/comm/mpi_calls.h"
#include "lib/device/terminal.h"

namespace {
MPI_Comm numbered = MPI_COMM_NULL;
}
MPI_Comm all_ranks() { return numbered; }

void check_mpi(int code, const char* call, const char* file, int line) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int n = 0;
  MPI_Error_string(code, text, &n);
  throw MpiError(strf("MPI: %s failed at %s:%d on rank %d: %s; see whether another rank stopped first", call, file,
                      line, this_rank(), text));
}

void finish(MPI_Request* request) {
  for (int spins = 0;; spins++) {
    int done = 0;
    MPI_CHECK(MPI_Test(request, &done, MPI_STATUS_IGNORE));
    if (done) return;
    if (spins < 100) std::this_thread::yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(spins < 1000 ? 50 : 500));
  }
}

Deadline::Deadline(double seconds, const std::string& line, int status) {
  ASSERT(status != 0);  // with 0 its launcher would wait for the others
  if (seconds <= 0) return;
  const char* number = std::getenv("OMPI_COMM_WORLD_RANK");  // MPI may not have told yet
  const double left = seconds + (number && std::strcmp(number, "0") != 0 ? 15 : 0);
  thread_ = std::thread([=] {
    std::unique_lock<std::mutex> lock(mutex_);
    if (met_.wait_for(lock, std::chrono::duration<double>(left), [&] { return is_met_; })) return;
    terminal::say(line);
    _exit(status);
  });
}

Deadline::~Deadline() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_met_ = true;
  }
  met_.notify_one();
  thread_.join();
}

World init_mpi(int* argc, char*** argv) {
  // Ranks on one host talk through shared memory only; copying out of another process's memory is often forbidden in
  // containers, and Open MPI then prints a page about it.
  setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0);
  // NVLink multicast stays off: all that we use works without it, and a crash while it is on can take a host's GPUs
  // down.
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  int provided = 0;
  MPI_CHECK(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided));
  MPI_CHECK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
  int rank = 0, host = 0;
  MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
  set_this_rank(rank);
  if (provided < MPI_THREAD_MULTIPLE)
    throw MpiError("MPI: this library was built without MPI_THREAD_MULTIPLE, which the streams need; use Open MPI");
  MPI_Comm mates;
  MPI_CHECK(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &mates));
  MPI_CHECK(MPI_Allreduce(&rank, &host, 1, MPI_INT, MPI_MIN, mates));
  MPI_CHECK(MPI_Comm_free(&mates));
  const World world = number_by_host(host);
  flight::share_with_host(world.rank, world.size);
  return world;
}

std::vector<int> by_host(const std::vector<int>& hosts) {
  std::vector<int> number(hosts.size(), -1);
  int next = 0;
  for (size_t first = 0; first < hosts.size(); first++) {
    if (number[first] >= 0) continue;  // of a host that an earlier rank is on
    for (size_t r = first; r < hosts.size(); r++)
      if (hosts[r] == hosts[first]) number[r] = next++;
  }
  return number;
}

World number_by_host(int host) {
  World w;
  MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &w.rank));
  MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &w.size));
  std::vector<int> hosts(size_t(w.size));
  MPI_CHECK(MPI_Allgather(&host, 1, MPI_INT, hosts.data(), 1, MPI_INT, MPI_COMM_WORLD));
  const std::vector<int> number = by_host(hosts);
  const int mine = number[size_t(w.rank)];
  for (size_t r = 0; r < hosts.size(); r++)
    if (hosts[r] == host && number[r] < mine) w.local_rank++;
  w.local_size = int(std::count(hosts.begin(), hosts.end(), host));
  w.rank = mine;
  if (numbered != MPI_COMM_NULL) MPI_CHECK(MPI_Comm_free(&numbered));
  MPI_CHECK(MPI_Comm_split(MPI_COMM_WORLD, 0, mine, &numbered));
  MPI_CHECK(MPI_Comm_set_errhandler(numbered, MPI_ERRORS_RETURN));
  set_this_rank(mine);
  return w;
}

void finish_mpi() {
  flight::unshare();
  if (numbered != MPI_COMM_NULL) MPI_Comm_free(&numbered);
  MPI_Finalize();
}

World shard_group(const World& world, int ranks) {
  ASSERT(ranks >= 1 && world.size % ranks == 0);
  World w;
  w.rank = world.rank % ranks, w.size = ranks, w.group = world.rank / ranks;
  w.local_size = std::min(ranks, world.local_size);
  return w;
}
World replica_group(const World& world, int ranks) {
  ASSERT(ranks >= 1 && world.size % ranks == 0);
  World w;
  w.rank = world.rank / ranks, w.size = world.size / ranks, w.group = world.rank % ranks;
  w.local_size = std::max(1, world.local_size / ranks);
  return w;
}
bool on_one_host(const World& world, int ranks) {
  const int host = world.rank - world.local_rank, group = world.rank / ranks * ranks;
  return group >= host && group + ranks <= host + world.local_size;
}

void abort_all_ranks(const std::string& text, int status, Cause cause) {
  std::signal(SIGTERM, SIG_DFL);  // with which launchers end ranks
  // Whatever holds this up, the library or a full pipe, holds it up for so long.
  std::thread([status] {
    std::this_thread::sleep_for(std::chrono::seconds(3));
    _exit(status);
  }).detach();
  if (!flight::speaks_first()) {
    for (int i = 0; i < 20 && !flight::is_done_speaking(); i++)
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // who spoke ends all, in the launcher's own way
    _exit(status);
  }
  const std::string records = cause == Cause::fault ? flight::write_records(text) : "";
  terminal::say("error: " + text + records);
  flight::done_speaking();
  int started = 0;
  MPI_Initialized(&started);
  if (started) MPI_Abort(MPI_COMM_WORLD, status);
  _exit(status);
}

bool is_fault(const std::exception& e) {
  return dynamic_cast<const CudaError*>(&e) || dynamic_cast<const CublasError*>(&e) ||
         dynamic_cast<const NcclError*>(&e) || dynamic_cast<const MpiError*>(&e);
}

void abort_all_ranks(const std::exception& e) {
  const std::string rank = strf("rank %d", this_rank()), what = e.what();
  const bool says_rank = what.find(rank) != std::string::npos;
  // What all ranks run into, a file that was cut, is said by the lowest, which ends the others meanwhile.
  std::this_thread::sleep_for(std::chrono::milliseconds(100) * std::clamp(this_rank(), 0, 20));
  abort_all_ranks(says_rank ? what : rank + ": " + what, 1, is_fault(e) ? Cause::fault : Cause::error);
}

void or_abort(const std::function<void()>& f) {
  try {
    f();
  } catch (const std::exception& e) { abort_all_ranks(e); }
}

void barrier() {
  const flight::OnHost recorded("barrier");
  MPI_Request request;
  MPI_CHECK(MPI_Ibarrier(all_ranks(), &request));
  finish(&request);
}

std::string broadcast_text(const std::string& text, int root) {
  const flight::OnHost recorded("broadcast");
  int64_t n = int64_t(text.size());  // no more than MPI counts
  ASSERT(n <= INT_MAX);
  MPI_CHECK(MPI_Bcast(&n, 1, MPI_INT64_T, root, all_ranks()));
  std::string out = text;
  out.resize(size_t(n));
  MPI_CHECK(MPI_Bcast(&out[0], int(n), MPI_CHAR, root, all_ranks()));
  return out;
}

std::vector<std::string> gather_texts(const std::string& text) {
  const flight::OnHost recorded("gather");
  int ranks = 0, mine = int(text.size());
  MPI_CHECK(MPI_Comm_size(all_ranks(), &ranks));
  ASSERT(text.size() <= size_t(INT_MAX) / size_t(ranks));  // what MPI counts
  std::vector<int> sizes(size_t(ranks), 0), at(size_t(ranks), 0);
  MPI_CHECK(MPI_Allgather(&mine, 1, MPI_INT, sizes.data(), 1, MPI_INT, all_ranks()));
  std::partial_sum(sizes.begin(), sizes.end() - 1, at.begin() + 1);
  std::string all(size_t(at.back() + sizes.back()), '\0');
  MPI_CHECK(MPI_Allgatherv(text.data(), mine, MPI_CHAR, &all[0], sizes.data(), at.data(), MPI_CHAR, all_ranks()));
  std::vector<std::string> texts;
  for (size_t r = 0; r < sizes.size(); r++) texts.push_back(all.substr(size_t(at[r]), size_t(sizes[r])));
  return texts;
}

std::string agree(const std::string& error) {
  const flight::OnHost recorded("agreement");
  int rank, size;
  MPI_CHECK(MPI_Comm_rank(all_ranks(), &rank));
  MPI_CHECK(MPI_Comm_size(all_ranks(), &size));
  int mine = error.empty() ? size : rank, lowest = size;
  MPI_CHECK(MPI_Allreduce(&mine, &lowest, 1, MPI_INT, MPI_MIN, all_ranks()));
  return lowest == size ? "" : broadcast_text(error, lowest);
}

// The lines of a text that another has not, in one.
static std::string lines_apart(const std::string& text, const std::string& other) {
  std::set<std::string> others;
  std::istringstream there(other), here(text);
  std::string apart;
  for (std::string line; std::getline(there, line);) others.insert(line);
  for (std::string line; std::getline(here, line);)
    if (!others.count(line)) apart += (apart.empty() ? "" : "; ") + line;
  return apart.empty() ? "nothing" : apart;
}

void require_same(const std::string& text, const std::string& what) {
  const flight::OnHost recorded("comparison");
  std::string first = broadcast_text(text);
  std::string error;
  if (text != first)
    error = strf(
        "%s of rank %d differs from that of rank 0; start all ranks with the same command and environment, which "
        "mpirun -x NAME passes to other hosts (rank 0: %s; rank %d: %s)",
        what.c_str(), this_rank(), lines_apart(first, text).c_str(), this_rank(), lines_apart(text, first).c_str());
  error = agree(error);
  if (!error.empty()) throw UsageError(error);
}

struct TextChannel::Impl {
  MPI_Comm mpi = MPI_COMM_NULL;
  int lane = -1;
  // What MPI reads and writes stands here, since a collective that was abandoned still may.
  int64_t n = 0;
  std::vector<int64_t> sizes;
  std::vector<int> counts, at;
  std::string mine, all;

  void wait(const char* what, MPI_Request* request, const std::atomic<bool>& abandoned) {
    flight::issue(lane, what, "", 0);
    flight::start(lane);
    for (int done = 0; !done;) {
      if (abandoned) throw Abandoned();
      MPI_CHECK(MPI_Test(request, &done, MPI_STATUS_IGNORE));
      if (!done) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    flight::finish(lane);
  }
};

TextChannel::TextChannel(const World& world) : world_(world), impl_(std::make_unique<Impl>()) {
  if (world.size == 1) return;
  MPI_CHECK(MPI_Comm_dup(all_ranks(), &impl_->mpi));
  MPI_CHECK(MPI_Comm_set_errhandler(impl_->mpi, MPI_ERRORS_RETURN));
  impl_->lane = flight::open_lane("texts");
}
TextChannel::~TextChannel() {
  if (impl_->lane >= 0) flight::close_lane(impl_->lane);
  if (abandoned_) (void)impl_.release();
  else if (impl_->mpi != MPI_COMM_NULL) MPI_Comm_free(&impl_->mpi);
}

std::vector<std::string> TextChannel::gather(const std::string& text) {
  if (world_.size == 1) return {text};
  Impl& i = *impl_;
  const size_t ranks = size_t(world_.size);
  i.mine = text, i.n = int64_t(text.size());
  i.sizes.resize(ranks), i.counts.resize(ranks), i.at.resize(ranks);
  // All know all sizes, so that all refuse together what MPI's ints cannot count.
  MPI_Request request;
  MPI_CHECK(MPI_Iallgather(&i.n, 1, MPI_INT64_T, i.sizes.data(), 1, MPI_INT64_T, i.mpi, &request));
  i.wait("gather of texts", &request, abandoned_);
  int64_t total = 0;
  for (size_t r = 0; r < ranks; r++) {
    i.counts[r] = int(i.sizes[r]), i.at[r] = int(total);
    total += i.sizes[r];
    if (total > INT_MAX) throw MpiError("the ranks' texts are more than 2 GiB together");
  }
  i.all.resize(world_.rank == 0 ? size_t(total) : 0);
  MPI_CHECK(MPI_Igatherv(i.mine.data(), i.counts[size_t(world_.rank)], MPI_CHAR, &i.all[0], i.counts.data(),
                         i.at.data(), MPI_CHAR, 0, i.mpi, &request));
  i.wait("gather of texts", &request, abandoned_);
  std::vector<std::string> texts;
  for (size_t r = 0; world_.rank == 0 && r < ranks; r++)
    texts.push_back(i.all.substr(size_t(i.at[r]), size_t(i.counts[r])));
  return texts;
}

std::string TextChannel::broadcast(const std::string& text) {
  if (world_.size == 1) return text;
  Impl& i = *impl_;
  i.all = text, i.n = int64_t(text.size());
  MPI_Request request;
  MPI_CHECK(MPI_Ibcast(&i.n, 1, MPI_INT64_T, 0, i.mpi, &request));
  i.wait("broadcast of texts", &request, abandoned_);
  if (i.n > INT_MAX) throw MpiError("a text is more than 2 GiB");
  i.all.resize(size_t(i.n));
  MPI_CHECK(MPI_Ibcast(&i.all[0], int(i.n), MPI_CHAR, 0, i.mpi, &request));
  i.wait("broadcast of texts", &request, abandoned_);
  return i.all;
}

std::string TextChannel::agree(const std::string& error) {
  std::string first;
  for (const std::string& e : gather(error))
    if (first.empty()) first = e;
  return broadcast(first);
}

std::string mpi_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int n = 0;
  MPI_Get_library_version(text, &n);
  std::string s(text);
  s = s.substr(0, s.find_first_of(",\n"));
  const std::string between = " Version:\t";  // MPICH's way
  const size_t at = s.find(between);
  return at == std::string::npos ? s : s.replace(at, between.size(), " ");
}

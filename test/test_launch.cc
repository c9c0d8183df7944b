// Launches that nobody meant: who started the ranks, what they have, where they are.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "lib/comm/gpus.h"
#include "lib/program/json.h"
#include "lib/program/launch.h"
#include "test/catch.h"
#include "test/errors.h"

namespace {

using Variables = std::map<std::string, std::string>;

// variables: must outlive it.
Environment of(const Variables& variables) {
  return [&](const char* name) {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  };
}

// The kind, the rank and the ranks; or the refusal.
std::string launched(const Variables& variables) {
  try {
    const Launcher by = launcher_of(of(variables));
    const char* kinds[] = {"none", "open_mpi", "pmi", "pmix", "srun", "slurm_job", "torchrun"};
    return strf("%s %d of %d", kinds[by.kind], by.rank, by.ranks);
  } catch (const UsageError& e) { return e.what(); }
}

RankFacts on(const std::string& host, int local_rank, int gpus = 0, const std::string& build = "a1b2") {
  RankFacts f;
  f.host = host, f.local_rank = local_rank, f.gpus = gpus, f.build = build, f.pid = 100 + local_rank;
  return f;
}

std::vector<RankFacts> cluster(int hosts, int ranks_each, const char* device = "GPU 0, NVIDIA H200") {
  std::vector<RankFacts> all;
  for (int h = 0; h < hosts; h++)
    for (int r = 0; r < ranks_each; r++) {
      all.push_back(on(strf("node-%d", h), r, ranks_each));
      all.back().device = device, all.back().pci = strf("0000:%02x:00.0", r);
    }
  return all;
}

size_t lines(const std::string& text) { return size_t(std::count(text.begin(), text.end(), '\n')); }

}  // namespace

TEST_CASE("who started a rank, by its environment", "[launch]") {
  CHECK(launched({}) == "none 0 of 1");
  CHECK(launched({{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "3"}}) == "open_mpi 3 of 4");
  CHECK(launched({{"PMI_SIZE", "2"}, {"PMI_RANK", "1"}}) == "pmi 1 of 2");
  CHECK(launched({{"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_PROCID", "5"}, {"PMIX_RANK", "5"}}) == "pmix 5 of 8");
  CHECK(launched({{"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "5"}}) == "srun 5 of 8");
  CHECK(launched({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}}) == "slurm_job 0 of 8");
  CHECK(launched({{"SLURM_NTASKS", "8"}}) == "slurm_job 0 of 8");
  CHECK(launched({{"WORLD_SIZE", "4"}, {"RANK", "2"}, {"LOCAL_RANK", "0"}}) == "torchrun 2 of 4");
  CHECK(launched({{"WORLD_SIZE", "4"}}) == "torchrun 0 of 4");
  // The nearest counts: mpirun in a job, in an environment that was made for torchrun.
  CHECK(launched({{"OMPI_COMM_WORLD_SIZE", "1"},
                  {"OMPI_COMM_WORLD_RANK", "0"},
                  {"PMIX_RANK", "0"},
                  {"SLURM_STEP_NUM_TASKS", "2"},
                  {"SLURM_NTASKS", "8"},
                  {"SLURM_PROCID", "1"},
                  {"WORLD_SIZE", "4"}}) == "open_mpi 0 of 1");
  // What MPI launchers say must be right; what others do may be anything.
  for (const char* size : {"0", "-1", "abc", "", "4x", "99999999999"}) {
    CHECK(has(launched({{"OMPI_COMM_WORLD_SIZE", size}}), strf("OMPI_COMM_WORLD_SIZE=%s ", size)));
    CHECK(has(launched({{"PMI_SIZE", size}, {"PMI_RANK", "0"}}), strf("PMI_SIZE=%s ", size)));
    CHECK(launched({{"WORLD_SIZE", size}}) == "none 0 of 1");
  }
  CHECK(has(launched({{"PMI_SIZE", "2"}, {"PMI_RANK", "2"}}), "PMI_RANK=2 "));
  CHECK(launched({{"WORLD_SIZE", "2"}, {"RANK", "everyone"}}) == "none 0 of 1");
}

TEST_CASE("CI is said with 1 or true", "[launch]") {
  CHECK(in_ci(of({{"CI", "1"}})));
  CHECK(in_ci(of({{"CI", "true"}})));
  CHECK(!in_ci(of({{"CI", "0"}})));
  CHECK(!in_ci(of({})));
}

TEST_CASE("one rank where more were meant is refused with the command to type", "[launch]") {
  const bool allowed = true, ci = true;
  struct {
    Launcher by;
    int gpus;
    std::vector<std::string> words;  // of the refusal; none: it runs
  } cases[] = {
      {{Launcher::none, 0, 1}, 0, {}},
      {{Launcher::none, 0, 1}, 1, {}},
      {{Launcher::none, 0, 1}, 2, {"2 GPUs", "mpirun -np 2 ./train --seq 64;", "--allow-single-rank"}},
      {{Launcher::open_mpi, 0, 1}, 8, {"8 GPUs", "mpirun -np 8 ./train --seq 64;"}},
      {{Launcher::open_mpi, 0, 1}, 1, {}},
      {{Launcher::open_mpi, 1, 4}, 1, {"Open MPI's mpirun started 4", "mpicxx"}},
      {{Launcher::pmi, 1, 4}, 1, {"started 4 processes", "mpirun -np 4 ./train --seq 64", "srun --mpi=pmix -n 4 "}},
      {{Launcher::pmix, 1, 4}, 1, {"srun started 4 tasks", "srun --mpi=pmix -n 4 ./train --seq 64"}},
      {{Launcher::srun, 1, 4}, 0, {"srun started 4 tasks", "srun --mpi=pmix -n 4 ./train --seq 64"}},
      {{Launcher::slurm_job, 0, 4}, 0, {"SLURM_NTASKS", "srun --mpi=pmix -n 4 ./train", "--allow-single-rank"}},
      {{Launcher::torchrun, 2, 4}, 0, {"WORLD_SIZE=4", "mpirun -np 4 ./train --seq 64", "--allow-single-rank"}},
      {{Launcher::torchrun, 0, 1}, 1, {}},
  };
  for (const auto& c : cases) {
    const SingleRank plain = judge_single_rank(c.by, c.gpus, !allowed, !ci, "./train --seq 64"),
                     meant = judge_single_rank(c.by, c.gpus, allowed, !ci, "./train --seq 64"),
                     in_ci = judge_single_rank(c.by, c.gpus, !allowed, ci, "./train --seq 64");
    INFO(c.by.kind << " " << c.by.ranks << " " << c.gpus << ": " << plain.error);
    CHECK(plain.error.empty() == c.words.empty());
    CHECK(!has(plain.error, "\n"));
    for (const std::string& word : c.words) {
      INFO(word);
      CHECK(has(plain.error, word));
    }
    CHECK(plain.notice.empty());
    CHECK((meant.error.empty() && meant.notice.empty()));
    // GPUs that stand idle are no harm in CI; processes that do not see each other write over each other's files.
    const bool idle = !c.words.empty() && c.by.ranks == 1;
    CHECK(in_ci.error.empty() == (c.words.empty() || idle));
    CHECK(in_ci.notice.empty() != idle);
  }
}

TEST_CASE("ranks that have what others have not are named", "[launch]") {
  CHECK(other_programs(cluster(2, 4)).empty());
  std::vector<RankFacts> ranks = cluster(2, 4);
  ranks[5].build = ranks[6].build = ranks[7].build = "c3d4";
  CHECK(other_programs(ranks) ==
        "ranks 5 to 7 (node-1): another build of this program (c3d4) than that of rank 0 on node-0 (a1b2); copy one "
        "build to all hosts");

  ranks = cluster(2, 4);
  CHECK(without_gpus(ranks).empty());
  CHECK(fewer_gpus(ranks).empty());
  ranks[1].gpus = 0;
  CHECK(has(without_gpus(ranks), "rank 1 (node-0): no GPU is visible"));
  for (RankFacts& f : ranks) f.gpus = 0;
  CHECK(without_gpus(ranks).empty());

  ranks = cluster(2, 4);
  for (int r : {2, 4, 5, 7}) ranks[size_t(r)].gpus = 2;
  CHECK(fewer_gpus(ranks) == "ranks 2, 4 to 5, 7 (node-0, node-1): fewer GPUs are visible (2) than to other ranks (4)");
  // Of thousands not all.
  ranks = cluster(1000, 2);
  for (size_t r = 1; r < ranks.size(); r += 2) ranks[r].build = "c3d4";
  CHECK(other_programs(ranks).size() < 400);
  CHECK(has(other_programs(ranks), "and 992 more"));
}

TEST_CASE("ranks share a GPU only where there are too few everywhere", "[launch]") {
  auto takes = [](int host, const char* card, std::vector<std::string> visible) {
    return RankGpu{host, {card, card}, host ? "node-b" : "node-a", std::move(visible)};
  };
  using Cards = std::vector<std::string>;
  const Cards both = {"0:1", "0:2"};
  // One each, seen by all or by itself alone; and two that somebody has but one GPU for.
  CHECK(wrong_sharing({takes(0, "0:1", both), takes(0, "0:2", both)}).empty());
  CHECK(wrong_sharing({takes(0, "0:1", {"0:1"}), takes(0, "0:2", {"0:2"})}).empty());
  CHECK(wrong_sharing({takes(0, "0:1", {"0:1"}), takes(0, "0:1", {"0:1"})}).empty());
  CHECK(wrong_sharing({takes(0, "0:1", both), takes(0, "0:2", both), takes(0, "0:1", both)}).empty());
  // Rank 1 does not see the GPU that is left.
  const std::string same = wrong_sharing({takes(0, "0:1", both), takes(0, "0:1", {"0:1"})});
  INFO(same);
  for (const char* word : {"ranks 0 and 1 on node-a", "GPU 0:1", "2 GPUs", "CUDA_VISIBLE_DEVICES"})
    CHECK(has(same, word));
  // One host has too few.
  const std::string few =
      wrong_sharing({takes(0, "0:1", both), takes(0, "0:2", both), takes(2, "0:1", {"0:1"}), takes(2, "0:1", {"0:1"})});
  INFO(few);
  for (const char* word : {"node-b has 1 GPU for its 2 ranks", "slots=1"}) CHECK(has(few, word));
  CHECK(wrong_sharing(
            {takes(0, "0:1", {"0:1"}), takes(0, "0:1", {"0:1"}), takes(2, "0:1", {"0:1"}), takes(2, "0:1", {"0:1"})})
            .empty());
}

TEST_CASE("where the ranks are, for people and for the log", "[launch]") {
  const std::string few = places_text(cluster(2, 2));
  CHECK(lines(few) == 5);
  for (const char* word :
       {"rank ", "local", "host", "device", "PCI", "3 of 4", "node-1", "NVIDIA H200", "0000:01:00.0"})
    CHECK(has(few, word));
  CHECK(lines(places_text(cluster(2, 8))) == 17);
  // A line a host, then the first hosts.
  const std::string folded = places_text(cluster(3, 8));
  CHECK(lines(folded) == 4);
  for (const char* word : {"16 to 23", "0-7", "node-2", "8 x GPU 0, NVIDIA H200"}) CHECK(has(folded, word));
  const std::string many = places_text(cluster(100, 8));
  CHECK(lines(many) == 18);
  CHECK(has(many, "and 672 ranks on 84 more hosts"));
  std::vector<RankFacts> cpu = {on("laptop", 0)};
  cpu[0].device = "A CPU";
  CHECK(places_text(cpu) == "  rank           local  host    device\n  0 of 1         0      laptop  A CPU\n");

  const nlohmann::json all = places_json(cluster(100, 8));
  REQUIRE(all.size() == 800);
  CHECK(all[9] == nlohmann::json{{"rank", 9},
                                 {"local_rank", 1},
                                 {"host", "node-1"},
                                 {"pid", 101},
                                 {"device", "GPU 0, NVIDIA H200"},
                                 {"pci", "0000:01:00.0"}});
  CHECK(!places_json(cpu)[0].contains("pci"));
}

TEST_CASE("a program has an id", "[launch]") {
  CHECK(has(build_id(), ", build "));
  CHECK(build_id() == build_id());
}

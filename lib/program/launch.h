// Whether the ranks that MPI sees are the ranks that somebody meant to start, and where each of them is. What judges is
// pure: the facts are gathered apart, so that a test can state them.
//
//   const Launcher by = launcher_of(std::getenv);
//   const std::vector<RankFacts> ranks = gather_facts(facts_here(world, gpu_count()));   // collective
//   const std::string wrong = other_programs(ranks);                                     // the same on all ranks
//   std::printf("%s", places_text(ranks).c_str());
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "nlohmann/json_fwd.hpp"

#include "lib/comm/world.h"

// What the environment says of who started this process. Of several that say something the one nearest to it counts:
// mpirun within a Slurm job, not the job.
struct Launcher {
  enum Kind {
    none,
    open_mpi,   // mpirun
    pmi,        // MPICH's mpiexec, or srun --mpi=pmi2
    pmix,       // srun --mpi=pmix
    srun,       // srun with neither
    slurm_job,  // a batch script's own shell
    torchrun,   // or an environment made for it: RANK, WORLD_SIZE, LOCAL_RANK
  };
  Kind kind = none;
  int rank = 0, ranks = 1;
  bool of_mpi() const { return kind == open_mpi || kind == pmi || kind == pmix; }
};
using Environment = std::function<const char*(const char* name)>;
// Throws UsageError that names the variable of an MPI launcher if it is no number, or no rank of that many.
Launcher launcher_of(const Environment& variable);
// Of those that a launcher of MPI started: the one that prints what all would. True where nobody can tell.
bool is_first_process();

// What is to be said of a run with one rank. gpus: that it could use, 0 if it shall use none. allowed:
// --allow-single-rank. ci: nobody is there who could start it in another way. typed: the command without mpirun.
struct SingleRank {
  std::string error, notice;  // at most one is not empty
};
SingleRank judge_single_rank(const Launcher& by, int gpus, bool allowed, bool ci, const std::string& typed);
bool in_ci(const Environment& variable);  // CI=1 or CI=true

// Of one rank. The device is known once it is open; device "" before.
struct RankFacts {
  int local_rank = 0;
  int64_t pid = 0;
  std::string host, build;
  int gpus = 0;  // that it sees
  std::string device, pci;
};
RankFacts facts_here(const World& world, int gpus);
std::vector<RankFacts> gather_facts(const RankFacts& here);  // by rank, on all ranks; collective

// Of what one rank has and another has not, naming the ranks; "" where all are alike. The first two are reasons to end.
std::string other_programs(const std::vector<RankFacts>& ranks);
std::string without_gpus(const std::vector<RankFacts>& ranks);  // where others see some
std::string fewer_gpus(const std::vector<RankFacts>& ranks);

// Where the ranks are. For people a line a rank; of more than 16 ranks a line a host, and of more than 16 hosts the
// first. For the log an object a rank.
std::string places_text(const std::vector<RankFacts>& ranks);
nlohmann::json places_json(const std::vector<RankFacts>& ranks);

// What tells this program from others: the commit and the linker's id of its content, the same for a copy.
std::string build_id();

#include "lib/program/launch.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>

#include <elf.h>
#include <link.h>
#include <unistd.h>

#include "lib/program/json.h"
#include "lib/program/report.h"

using nlohmann::json;

// -------------------------------------------------------------------------------------------------------- launchers

namespace {

bool is_number(const char* text, int* value) {
  const char* end = text + std::strlen(text);
  const auto [at, error] = std::from_chars(text, end, *value);
  return error == std::errc() && at == end && *text;
}

struct Variables {
  Launcher::Kind kind;
  const char *ranks, *rank;
  bool both = false;  // it is this launcher only if both are there
};
// Open MPI's mpirun sets PMIX_RANK too, and one that starts its ranks through Slurm leaves them Slurm's variables: the
// nearest is the first.
constexpr Variables known[] = {
    {Launcher::open_mpi, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
    {Launcher::pmi, "PMI_SIZE", "PMI_RANK", true},
    {Launcher::pmix, "SLURM_STEP_NUM_TASKS", "PMIX_RANK", true},
    {Launcher::srun, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", true},
    {Launcher::slurm_job, "SLURM_NTASKS", "SLURM_PROCID"},
    {Launcher::torchrun, "WORLD_SIZE", "RANK"},
};

}  // namespace

Launcher launcher_of(const Environment& variable) {
  for (const Variables& v : known) {
    const char *ranks = variable(v.ranks), *rank = variable(v.rank);
    if (!ranks || (!rank && v.both)) continue;
    Launcher by;
    by.kind = v.kind;
    const bool good = is_number(ranks, &by.ranks) && by.ranks >= 1;
    const bool rank_good = !rank || (is_number(rank, &by.rank) && by.rank >= 0 && by.rank < by.ranks);
    // WORLD_SIZE and RANK may be anybody's.
    if (!by.of_mpi() && !(good && rank_good)) continue;
    REQUIRE_USER(good, "%s=%s in the environment: not a number of ranks; unset it, or start with mpirun", v.ranks,
                 ranks);
    REQUIRE_USER(rank_good, "%s=%s in the environment: not a rank of %d; unset it, or start with mpirun", v.rank, rank,
                 by.ranks);
    return by;
  }
  return {};
}

bool in_ci(const Environment& variable) {
  const char* ci = variable("CI");
  return ci && (!std::strcmp(ci, "1") || !std::strcmp(ci, "true"));
}

bool is_first_process() {
  try {
    const Launcher by = launcher_of(std::getenv);
    return !by.of_mpi() || by.rank == 0;
  } catch (const UsageError&) { return true; }
}

SingleRank judge_single_rank(const Launcher& by, int gpus, bool allowed, bool ci, const std::string& typed) {
  if (allowed) return {};
  const int n = by.ranks;
  const char* command = typed.c_str();
  const std::string through_slurm = strf("srun --mpi=pmix -n %d %s", n, command);
  if (n > 1) switch (by.kind) {
      case Launcher::none:
        break;
      case Launcher::open_mpi:
        return {
            strf("Open MPI's mpirun started %d processes, but each is a rank alone to the MPI of this program (%s); "
                 "use that MPI's mpirun, or rebuild with Open MPI's mpicxx",
                 n, mpi_version().c_str()),
            ""};
      case Launcher::pmi:
        return {
            strf("MPICH's mpiexec, or srun --mpi=pmi2, started %d processes, but each is a rank alone to the MPI of "
                 "this program (%s); type: mpirun -np %d %s; or under Slurm: %s",
                 n, mpi_version().c_str(), n, command, through_slurm.c_str()),
            ""};
      case Launcher::pmix:
      case Launcher::srun:
        return {
            strf("srun started %d tasks, but each is a rank alone to MPI; type: %s (srun --mpi=list names what this "
                 "Slurm has)",
                 n, through_slurm.c_str()),
            ""};
      case Launcher::slurm_job:
        return {strf("this Slurm job has %d tasks (SLURM_NTASKS), and this is one rank; type: %s; one rank is meant: "
                     "--allow-single-rank",
                     n, through_slurm.c_str()),
                ""};
      case Launcher::torchrun:
        return {strf("WORLD_SIZE=%d in the environment, as torchrun sets it, but MPI starts the ranks of this program, "
                     "and this is one; type: mpirun -np %d %s; one rank is meant: --allow-single-rank",
                     n, n, command),
                ""};
    }
  if (gpus <= 1) return {};
  const std::string unused = strf("%d GPUs are visible, and one rank uses one of them", gpus);
  if (ci) return {"", unused + " (CI is set: going on)"};
  return {strf("%s; type: mpirun -np %d %s; one is meant: --allow-single-rank, or CUDA_VISIBLE_DEVICES=0",
               unused.c_str(), gpus, command),
          ""};
}

// ------------------------------------------------------------------------------------------------------------ facts

std::string build_id() {
  std::string id;
  // The program itself comes first.
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        for (int i = 0; i < info->dlpi_phnum; i++) {
          const auto& segment = info->dlpi_phdr[i];
          if (segment.p_type != PT_NOTE) continue;
          const char *at = reinterpret_cast<const char*>(info->dlpi_addr + segment.p_vaddr),
                     *end = at + segment.p_memsz;
          while (at + sizeof(ElfW(Nhdr)) <= end) {
            ElfW(Nhdr) note;
            std::memcpy(&note, at, sizeof note);
            const char *name = at + sizeof note, *content = name + (note.n_namesz + 3) / 4 * 4;
            if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && !std::memcmp(name, "GNU", 4))
              for (unsigned b = 0; b < note.n_descsz; b++)
                *static_cast<std::string*>(out) += strf("%02x", unsigned(static_cast<unsigned char>(content[b])));
            at = content + (note.n_descsz + 3) / 4 * 4;
          }
        }
        return 1;
      },
      &id);
  return commit() + (id.empty() ? "" : ", build " + id.substr(0, 16));
}

RankFacts facts_here(const World& world, int gpus) {
  RankFacts f;
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  f.local_rank = world.local_rank, f.pid = getpid(), f.host = host, f.build = build_id(), f.gpus = gpus;
  return f;
}

std::vector<RankFacts> gather_facts(const RankFacts& f) {
  const json mine = {f.local_rank, f.pid, f.host, f.build, f.gpus, f.device, f.pci};
  std::vector<RankFacts> all;
  for (const std::string& text : gather_texts(mine.dump(-1, ' ', false, json::error_handler_t::replace))) {
    const json j = json::parse(text);
    all.push_back({j[0], j[1], j[2], j[3], j[4], j[5], j[6]});
  }
  return all;
}

// --------------------------------------------------------------------------------------------------------- judgement

namespace {

// "rank 3 (node-a)", "ranks 0 to 3 and 5 (node-a, node-b)"; of many runs and hosts the first.
std::string named(const std::vector<RankFacts>& ranks, const std::vector<int>& which) {
  std::vector<std::string> runs, hosts;
  for (size_t i = 0, end; i < which.size(); i = end) {
    for (end = i + 1; end < which.size() && which[end] == which[end - 1] + 1;) end++;
    runs.push_back(end - i == 1 ? std::to_string(which[i]) : strf("%d to %d", which[i], which[end - 1]));
  }
  for (int r : which)
    if (std::find(hosts.begin(), hosts.end(), ranks[size_t(r)].host) == hosts.end())
      hosts.push_back(ranks[size_t(r)].host);
  auto list = [](const std::vector<std::string>& items) {
    constexpr size_t most = 8;
    std::string text;
    for (size_t i = 0; i < std::min(items.size(), most); i++) text += (i ? ", " : "") + items[i];
    return text + (items.size() > most ? strf(" and %zu more", items.size() - most) : "");
  };
  return strf("rank%s %s (%s)", which.size() > 1 ? "s" : "", list(runs).c_str(), list(hosts).c_str());
}

template <class Is>
std::vector<int> those(const std::vector<RankFacts>& ranks, Is is) {
  std::vector<int> which;
  for (size_t r = 0; r < ranks.size(); r++)
    if (is(ranks[r])) which.push_back(int(r));
  return which;
}

}  // namespace

std::string other_programs(const std::vector<RankFacts>& ranks) {
  const RankFacts& first = ranks[0];
  const std::vector<int> others = those(ranks, [&](const RankFacts& f) { return f.build != first.build; });
  if (others.empty()) return "";
  return strf("%s: another build of this program (%s) than that of rank 0 on %s (%s); copy one build to all hosts",
              named(ranks, others).c_str(), ranks[size_t(others[0])].build.c_str(), first.host.c_str(),
              first.build.c_str());
}

std::string without_gpus(const std::vector<RankFacts>& ranks) {
  const std::vector<int> without = those(ranks, [](const RankFacts& f) { return f.gpus == 0; });
  if (without.empty() || without.size() == ranks.size()) return "";
  return strf(
      "%s: no GPU is visible, and the other ranks see some; look at nvidia-smi and CUDA_VISIBLE_DEVICES there, "
      "or use --device cpu",
      named(ranks, without).c_str());
}

std::string fewer_gpus(const std::vector<RankFacts>& ranks) {
  int most = 0, least = ranks[0].gpus;
  for (const RankFacts& f : ranks) most = std::max(most, f.gpus), least = std::min(least, f.gpus);
  if (least == most) return "";
  const std::vector<int> fewer = those(ranks, [&](const RankFacts& f) { return f.gpus < most; });
  return strf("%s: fewer GPUs are visible (%d) than to other ranks (%d)", named(ranks, fewer).c_str(), least, most);
}

// ------------------------------------------------------------------------------------------------------------ places

std::string places_text(const std::vector<RankFacts>& ranks) {
  constexpr size_t most = 16;
  size_t width = 4;
  for (const RankFacts& f : ranks) width = std::max(width, f.host.size());
  auto line = [&](const std::string& rank, const std::string& local, const std::string& host, const std::string& what,
                  const std::string& pci) {
    std::string text = strf("  %-14s %-6s %-*s  %-32s %s", rank.c_str(), local.c_str(), int(width), host.c_str(),
                            what.c_str(), pci.c_str());
    return text.substr(0, text.find_last_not_of(' ') + 1) + "\n";
  };
  std::string text = line("rank", "local", "host", "device", ranks[0].pci.empty() ? "" : "PCI");
  if (ranks.size() <= most) {
    for (size_t r = 0; r < ranks.size(); r++)
      text += line(strf("%zu of %zu", r, ranks.size()), std::to_string(ranks[r].local_rank), ranks[r].host,
                   ranks[r].device, ranks[r].pci);
    return text;
  }
  size_t hosts = 0, left = 0;
  for (size_t r = 0, end; r < ranks.size(); r = end) {  // a host's ranks are neighbours
    for (end = r + 1; end < ranks.size() && ranks[end].local_rank > ranks[end - 1].local_rank;) end++;
    if (++hosts > most) {
      left += end - r;
      continue;
    }
    std::map<std::string, int> devices;
    for (size_t i = r; i < end; i++) devices[ranks[i].device]++;
    std::string what;
    for (const auto& [name, n] : devices) what += (what.empty() ? "" : ", ") + strf("%d x ", n) + name;
    text += line(strf("%zu to %zu", r, end - 1), strf("0-%zu", end - 1 - r), ranks[r].host, what,
                 ranks[r].pci.empty() ? "" : ranks[r].pci + "...");
  }
  if (left > 0) text += strf("  and %zu ranks on %zu more hosts, which --log lists\n", left, hosts - most);
  return text;
}

json places_json(const std::vector<RankFacts>& ranks) {
  json all = json::array();
  for (size_t r = 0; r < ranks.size(); r++) {
    const RankFacts& f = ranks[r];
    all.push_back({{"rank", r}, {"local_rank", f.local_rank}, {"host", f.host}, {"pid", f.pid}, {"device", f.device}});
    if (!f.pci.empty()) all.back()["pci"] = f.pci;
  }
  return all;
}

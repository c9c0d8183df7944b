// What a run is made of, for --diagnostics: its environment, the types of its numbers, its memory.
#pragma once

#include <string>

#include "nlohmann/json_fwd.hpp"

#include "lib/program/run.h"

// env.json: of the log's header what says where and with what a run was started; this host; and of the environment's
// variables those that change a run, and no others: who reads it may not know the rest.
nlohmann::json environment_json(const nlohmann::json& header, const Device& dev);

// dtypes_report_fsdp.txt: how many elements of each type the master weights have; the parameters one by one, `PARAM
// name type [shape]`; and what else has a type, `USE what type`. shards: ranks of a shard group.
std::string dtypes_text(const Run& r, int shards);

// mem_fsdp_*.json and .txt. m: as planned; what is free is asked now.
nlohmann::json memory_json(const MemoryReport& m, const Device& dev);
std::string memory_text(const MemoryReport& m, const Device& dev, int world_size);

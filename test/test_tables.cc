// lib/program/tables.h: from rows of results to Markdown, figure by figure.
#include <cmath>
#include <string>
#include <vector>

#include "lib/program/tables.h"
#include "lib/program/timing.h"
#include "test/errors.h"
#include "test/result_rows.h"

using nlohmann::json;

namespace {

constexpr Whose theirs = Whose::theirs, pytorch = Whose::pytorch, ours = Whose::ours, ratio = Whose::ratio;

Table companion(std::vector<Column> columns) {
  Table t = {"depth", {"depth-2gpu"}};
  t.columns = std::move(columns);
  return t;
}
// Without the spaces and dashes that make columns equally wide.
std::string squeezed(const std::string& text) {
  std::string out;
  for (char c : text)
    if (out.empty() || c != out.back() || (c != ' ' && c != '-')) out += c;
  return out;
}

}  // namespace

TEST_CASE("a companion table has theirs, PyTorch's and ours in a line", "[tables]") {
  const Table t = companion({{theirs, "peak_mib"},
                             {theirs, "step_ms"},
                             {pytorch, "peak_mib"},
                             {pytorch, "step_ms"},
                             {ours, "peak_mib"},
                             {ours, "planned_peak_mib"},
                             {ours, "step_ms"},
                             {ours, "mfu"},
                             {ratio, "step_ms"}});
  std::vector<json> rows = depth_rows();
  rows.erase(rows.begin());  // the planned one, on 8 GPUs
  CHECK(squeezed(training_table(rows, t))
            .rfind("| depth | theirs, 2 x A100 SXM: peak MiB | theirs: step ms | PyTorch: peak MiB | PyTorch: step ms "
                   "| ours: peak MiB | ours: planned peak MiB | ours: step ms | ours: MFU | ours / PyTorch: step ms | "
                   "note |\n"
                   "| -: | -: | -: | -: | -: | -: | -: | -: | -: | -: | - |\n"
                   "| 4 | 14,550 | 1,119 | 12,823 | 375.5 | 11,078 | 11,078 | 350.3 | 52.1 % | 0.93 | |\n"
                   "| 32 | OOM bwd | - | OOM | - | 91,204 † | - | 2,521.6 | - | - "
                   "| PyTorch: tried to allocate 2.00 GiB |\n"
                   "\n† more than fits in a GPU of 80 GiB, of which CUDA, cuBLAS and NCCL take ",
                   0) == 0);
}

TEST_CASE("a ratio of two days says so", "[tables]") {
  std::vector<json> rows = {result_row(1, "4", "fsdp.cu", 350.25, 1), result_row(1, "4", "PyTorch", 375.5, 2),
                            result_row(2, "8", "fsdp.cu", 700, 1), result_row(2, "8", "PyTorch", 750, 2)};
  rows[3]["date"] = "2026-11-22T23:59:59.999Z";
  const Table t = companion({{ours, "step_ms"}, {ratio, "step_ms"}});
  CHECK(!has(training_table(rows, t), "days"));
  rows[3]["date"] = "2026-11-23T00:00:00.000Z";
  CHECK(has(training_table(rows, t), " |\n\nOurs and PyTorch's ran on different days in: `8`.\n"));
  CHECK(!has(training_table(rows, companion({{ours, "step_ms"}, {pytorch, "step_ms"}})), "days"));
}

TEST_CASE("what is planned says so, and numbers of GPUs stand where they differ", "[tables]") {
  const std::string text =
      training_table(depth_rows(), companion({{ours, "peak_mib"}, {ours, "step_ms"}, {ratio, "step_ms"}}));
  CHECK(has(text, "| depth | GPUs | ours: peak MiB"));
  CHECK(has(text, "|    64 |    8 |       *61,000* |     *5,100.5* |"));
  CHECK(has(text, "*planned*"));
  CHECK(!has(text, "needs 8 GPUs"));  // a table without PyTorch has nothing to say of it
  CHECK(has(training_table(depth_rows(), companion({{pytorch, "step_ms"}})), "*planned*; PyTorch: needs 8 GPUs"));
}

TEST_CASE("a planned row has no ratio, and where it has no figures of a run those of its plan, rounded", "[tables]") {
  json planned = result_row(1, "4", "fsdp.cu", 0, 0), peer = result_row(1, "4", "PyTorch", 375.5, 12823);
  planned["planned"] = true;
  planned["result"] = {{"planned_peak_mib", 8099.5}, {"estimated_ms", 341.07}};
  const Table t = companion({{ours, "peak_mib"}, {ours, "step_ms"}, {pytorch, "step_ms"}, {ratio, "step_ms"}});
  CHECK(has(squeezed(training_table({planned, peer}, t)), "| 4 | *8,100* | *341.1* | 375.5 | - | *planned* |"));
  CHECK(figure_text({planned, peer}, "4", "ratio", "step_ms") == "-");
  planned["planned"] = false;
  CHECK(has(squeezed(training_table({planned, peer}, t)), "| 4 | - | - | 375.5 | - |"));
  planned["result"]["step_ms"] = 341.07;
  CHECK(figure_text({planned, peer}, "4", "ratio", "step_ms") == "0.91");
}

TEST_CASE("a measured row stands before a planned one, whichever file has it", "[tables]") {
  json planned = result_row(1, "4", "fsdp.cu", 111, 1), measured = result_row(1, "4", "fsdp.cu", 350.25, 2);
  planned["planned"] = true;
  for (const auto& rows : {std::vector<json>{planned, measured}, std::vector<json>{measured, planned}}) {
    const std::vector<json> one = merged_rounds(rows);
    REQUIRE(one.size() == 1);
    CHECK(one[0]["result"]["step_ms"] == 350.25);
  }
}

TEST_CASE("several numbers of GPUs side by side", "[tables]") {
  std::vector<json> rows = depth_rows();
  json one = result_row(1, "4", "fsdp.cu", 340.5, 20000);
  one["ranks"] = 1;
  rows.push_back(one);
  Table t = companion({{theirs, "step_ms"}, {ours, "step_ms"}});
  t.layout = Layout::side_by_side, t.rows = {"4"};
  CHECK(training_table(rows, t) ==
        "| depth | theirs, 2 x A100 SXM: step ms | ours, 1 GPU: step ms | ours, 2 GPUs: step ms |\n"
        "| ----: | ----------------------------: | -------------------: | --------------------: |\n"
        "|     4 |                         1,119 |                340.5 |                 350.3 |\n");
}

TEST_CASE("rounds are shown by their median, and each where it is asked for", "[tables]") {
  std::vector<json> rows;
  for (int round = 1; round <= 3; round++) {
    rows.push_back(result_row(1, "4", "fsdp.cu", 300 + 10.5 * round, 11078));
    if (round > 1) rows.back()["round"] = round;
  }
  const std::vector<json> one = merged_rounds(rows);
  REQUIRE(one.size() == 1);
  CHECK(one[0]["result"]["step_ms"] == 321);
  CHECK(one[0]["result"]["step_ms_min"] == 309.5);
  CHECK(one[0]["result"]["step_ms_max"] == 333.5);
  CHECK(training_table(rows, companion({{ours, "step_ms", "", Column::each}, {ours, "step_ms"}})) ==
        "| depth |       ours: step ms | ours: step ms |\n"
        "| ----: | ------------------: | ------------: |\n"
        "|     4 | 310.5 / 321 / 331.5 |           321 |\n");
  rows[1].erase("result"), rows[1]["error"] = "timed out after 900 s";
  CHECK(merged_rounds(rows)[0]["result"]["step_ms"] == 321);  // of the two that are left, 310.5 and 331.5
  CHECK(has(training_table(rows, companion({{ours, "step_ms"}})), "round 2: timeout"));
}

TEST_CASE("of PyTorch's variants the fastest stands in a column that names none", "[tables]") {
  json flex = result_row(1, "4", "PyTorch", 400.5, 1), sdpa = result_row(1, "4", "PyTorch", 375.5, 2);
  flex["variant"] = "flex", sdpa["variant"] = "sdpa";
  const std::vector<json> rows = {flex, sdpa, result_row(1, "4", "fsdp.cu", 350.25, 3)};
  const std::string text =
      training_table(rows, companion({{pytorch, "step_ms"}, {pytorch, "step_ms", "flex"}, {ratio, "step_ms"}}));
  CHECK(has(text, "| PyTorch: step ms | PyTorch flex: step ms |"));
  CHECK(has(text, "375.5 (sdpa) |"));
  CHECK(has(text, " 400.5 |"));
  CHECK(has(text, " 0.93 |"));
}

TEST_CASE("a row's target stands before what was measured", "[tables]") {
  json time = result_row(1, "rope", "fsdp.cu", 300.25, 1), peer = result_row(1, "rope", "PyTorch", 330.5, 1);
  time["target"] = {{"figure", "step_ms"}, {"before", 310}, {"goal", 295}, {"aim", 285}};
  json rate = result_row(2, "llama-8b", "fsdp.cu", 1440, 1);
  rate["target"] = {{"figure", "tokens_per_sec_gpu"}, {"before", 11076}, {"goal", 11500}};
  rate["result"]["tokens_per_sec"] = 22755.6, rate["no_peer"] = "PyTorch cannot";
  const std::string wanted =
      "| depth | figure | before | goal | aim | PyTorch | ours | ours / PyTorch: step ms | note |\n"
      "| - | -: | -: | -: | -: | -: | -: | -: | - |\n"
      "| rope | step ms | 310 | 295 | 285 | 330.5 | 300.3 | 0.91 | |\n"
      "| llama-8b | tokens/s a GPU | 11,076 | 11,500 | - | - | 11,378 | - | PyTorch cannot |\n";
  CHECK(squeezed(training_table({time, peer, rate}, find_table("targets"))) == wanted);
  CHECK(squeezed(sweep_table({time, peer, rate})) == wanted);  // what ends the sweep too
  time.erase("target"), rate.erase("target");
  CHECK(has(sweep_table({time, peer, rate}), "| depth    | who     | peak MiB |"));
}

TEST_CASE("kinds of work stand beside their limits", "[tables]") {
  json row = result_row(1, "rope", "fsdp.cu", 300.25, 1);
  row["result"].update({{"products_ms", 250.5},
                        {"products_limit_ms", 167},
                        {"attention_ms", 0},
                        {"waiting_ms", 3.25},
                        {"attention_limit_ms", 0},
                        {"memory_bound_ms", 20.5}});
  CHECK(squeezed(training_table({row}, find_table("step-shares"))) ==
        "| depth | step ms | products ms | limit ms | times the limit | attention ms | limit ms | times the limit | "
        "memory-bound ms | limit ms | times the limit | waiting ms |\n"
        "| - | -: | -: | -: | -: | -: | -: | -: | -: | -: | -: | -: |\n"
        "| rope | 300.3 | 250.5 | 167 | 1.50 | 0.00 | 0.00 | - | 20.5 | - | - | 3.25 |\n");
  CHECK(has(sweep_table({row}), "| products ms | limit ms | times the limit |"));
}

TEST_CASE("what ends a sweep has a line a row and who", "[tables]") {
  const std::string text = sweep_table(depth_rows());
  CHECK(has(text, "| depth | GPUs | who                  | peak MiB | planned peak MiB |"));
  CHECK(has(text, "|     4 |    2 | theirs, 2 x A100 SXM |   14,550 |                - |"));
  CHECK(has(text, "|    32 |    2 | PyTorch              |      OOM |"));
  CHECK(has(text, "2,521.6 (2,520.6-2,523.6) |"));
  CHECK(!has(text, "tokens/s, "));
  CHECK(!has(text, "NCCL's share"));  // no row has it
}

TEST_CASE("rows that are not of training have the columns of their kind", "[tables]") {
  const auto layer = [](const char* kernel, double ms) {
    return json{{"attention", {{"B", 1}, {"T", 8192}, {"H", 32}, {"HKV", 8}, {"D", 128}}},
                {"kernel", kernel},
                {"result", {{"forward_ms", ms}, {"forward_backward_ms", 3 * ms}, {"planned_peak_mib", 100.4}}}};
  };
  CHECK(squeezed(sweep_table({layer("nsa", 1.3161), layer("dense", 0.7841)})) ==
        "| tokens | heads | NSA: forward ms | NSA: forward + backward ms | NSA: planned MiB | dense: forward ms "
        "| dense: forward + backward ms | dense: planned MiB |\n"
        "| -: | -: | -: | -: | -: | -: | -: | -: |\n"
        "| 8,192 | 32/8 | 1.32 | 3.95 | 100 | 0.784 | 2.35 | 100 |\n");
  json wide = layer("nsa", 2);
  wide["attention"].update({{"D", 192}, {"DV", 128}});
  CHECK(has(squeezed(sweep_table({layer("nsa", 1), wide})), "| 8,192 | 32/8, D 192/128 | 2.00 |"));
  // A kernel's row names the rule by which a query sees keys, where there is another than the causal one.
  const auto kernel = [](const json& rule) {
    json row = {{"attention", {{"B", 1}, {"T", 4096}, {"H", 32}, {"HKV", 8}, {"D", 128}}},
                {"kernel", "sm_90a (wgmma)"},
                {"result", {{"forward_ms", 0.078}, {"forward_tflops", 441.2}}}};
    row["attention"].update(rule);
    return row;
  };
  const std::string kernels =
      sweep_table({kernel(json::object()), kernel({{"window", 512}}), kernel({{"D", 192}, {"DV", 128}}),
                   kernel({{"compressed", {{"block", 32}, {"stride", 16}}}})});
  CHECK(has(squeezed(kernels), "| B 1, T 4,096, 32/8 heads, D 128 | sm_90a (wgmma) | 0.078 | 441 |"));
  CHECK(has(squeezed(kernels), "| B 1, T 4,096, 32/8 heads, D 128, window 512 |"));
  CHECK(has(squeezed(kernels), "| B 1, T 4,096, 32/8 heads, D 192/128 |"));
  CHECK(has(squeezed(kernels), "| B 1, T 4,096, 32/8 heads, D 128, keys compressed 32/16 |"));
  const json collective = {
      {"collective", "all_gather"},
      {"by", "NCCL"},
      {"mib", 336},
      {"ranks", 2},
      {"result", {{"ms", 0.842}, {"of_link", 0.7}, {"product_ms", 1.0}, {"product_beside_ms", 1.66}}}};
  CHECK(has(sweep_table({collective}), "| all_gather | NCCL |    2 | 336 | 0.842 |"));
  CHECK(has(sweep_table({collective}), "x 1.66 |"));
}

TEST_CASE("rows of one attention stand together, in the order of their first", "[tables]") {
  const auto row = [](int64_t T, const char* kernel) { return json{{"attention", {{"T", T}}}, {"kernel", kernel}}; };
  const std::vector<json> rows = {row(8192, "a"), row(8192, "b"), row(4096, "a"), row(4096, "theirs"),
                                  row(8192, "theirs")};
  CHECK(by_attention(rows) == std::vector<json>{rows[0], rows[1], rows[4], rows[2], rows[3]});
  CHECK(by_attention({}).empty());
}

TEST_CASE("TFLOP/s of kernels follow from their time and shape", "[tables][measured]") {
  int64_t rows = 0;
  for (const json& row : read_json_lines("results/kernels-1gpu.jsonl")) {
    const json& a = row.at("attention");
    if (a.contains("window") || a.contains("compressed")) continue;
    const int64_t B = a.at("B"), T = a.at("T"), H = a.at("H"), D = a.at("D");
    json result = row.at("result");
    add_tflops(&result, double(B * H) * causal_pairs(T), D, a.value("DV", D));
    for (const char* key : {"forward_tflops", "forward_backward_tflops"})
      CHECK(std::abs(result.at(key).get<double>() / row.at("result").at(key).get<double>() - 1) < 1e-12);
    ++rows;
  }
  CHECK(rows > 0);
}

TEST_CASE("PyTorch's rows of attention stay until it has run anew on that GPU", "[tables]") {
  const auto row = [](int64_t T, const char* who, const char* gpu, double ms) {
    json j = {{"attention", {{"T", T}}}, {"hardware", {{"name", gpu}}}, {"result", {{"forward_ms", ms}}}};
    if (*who) j["who"] = who;
    return j;
  };
  const json ours = row(4096, "", "H200", 1), theirs = row(4096, "PyTorch", "H200", 2);
  const auto kept = [](const std::vector<json>& before, std::vector<json> now) {
    keep_peers(before, &now);
    return now;
  };
  CHECK(kept({row(4096, "", "H200", 3), theirs}, {ours}) == std::vector<json>{ours, theirs});
  CHECK(kept({row(4096, "PyTorch", "H100", 2)}, {ours}) == std::vector<json>{ours});
  const json anew = row(4096, "PyTorch", "H200", 4), other = row(8192, "PyTorch", "H200", 5);
  CHECK(kept({theirs, other}, {ours, anew}) == std::vector<json>{ours, anew, other});
}

TEST_CASE("files of rows are read in order or refused in a line", "[tables]") {
  const ScratchDirectory dir;
  const std::vector<json> rows = read_rows({rows_in(dir, "depth-2gpu.jsonl", depth_rows())});
  REQUIRE(rows.size() == 5);
  CHECK(rows[0]["number"] == 1);
  CHECK(rows[4]["number"] == 3);
  CHECK(error_of<UsageError>([&] { read_rows({dir / "none"}); }) == dir / "none" + " cannot be read");
  CHECK(error_of<UsageError>([&] { read_rows({dir.file("empty", "")}); }) == dir / "empty" + " is empty");
  CHECK(error_of<UsageError>([&] { read_rows({dir.file("foreign", "\nhello\n")}); }) ==
        dir / "foreign" + ", line 2: not a row of ./bench --sweep");
  CHECK(error_of<UsageError>([&] { read_rows({dir.file("other", "{\"step\": 1}\n")}); }) ==
        dir / "other" + ", line 1: not a row of ./bench --sweep");
  const std::pair<const char*, json> wrong[] = {{"/number", "1"},
                                                {"/ranks", nullptr},
                                                {"/round", 1.5},
                                                {"/who", 3},
                                                {"/date", 20261122},
                                                {"/hardware", "H200"},
                                                {"/hardware/name", nullptr},
                                                {"/labels", json::array({"depth"})},
                                                {"/theirs/text", 1},
                                                {"/error", json::object()},
                                                {"/result", json::array()},
                                                {"/losses", 2.5},
                                                {"/val_losses", json::array({2.5})}};
  for (const auto& [pointer, value] : wrong) {
    std::vector<json> all = depth_rows();
    all[2][json::json_pointer(pointer)] = value;
    const std::string path = rows_in(dir, "wrong.jsonl", all), said = error_of<UsageError>([&] { read_rows({path}); });
    INFO(pointer << ": " << said);
    CHECK(said.rfind(path + ", line 3: \"", 0) == 0);
    CHECK(has(said, "\" is " + value.dump() + ", not "));
  }
}

TEST_CASE("errors are told in a word", "[tables]") {
  CHECK(error_word("OOM bwd") == "OOM bwd");
  CHECK(error_word("OOM: tried to allocate") == "OOM");
  CHECK(error_word("torch.OutOfMemoryError: CUDA out of memory") == "OOM");
  CHECK(error_word("badshape: 768") == "badshape");
  CHECK(error_word("timed out after 900 s") == "timeout");
  CHECK(error_word("exit status 1") == "failed");
  CHECK(error_word("x: write failed: No space left on device; make room there") == "failed");
  CHECK(error_word("rank 1: CUDA OOM") == "OOM");
  CHECK(error_word("no room in memory: the plan asks for 192332 MiB") == "OOM");
}

TEST_CASE("what most rows were not measured at is named with its rows", "[tables]") {
  const ScratchDirectory dir;
  std::vector<json> rows;
  const auto add = [&](int number, const char* who, const char* commit) {
    rows.push_back(result_row(number, std::to_string(1 << number), who, 350.25, 11078));
    rows.back()["commit"] = commit;
  };
  for (int n : {1, 2, 3}) add(n, "PyTorch", "0ld0ne5");
  for (int n : {1, 2}) add(n, "fsdp.cu", "abc1234");
  const auto says = [&](const char* commits) {
    rows_in(dir, "depth-2gpu.jsonl", rows);
    return has(render(find_table("depth"), dir.path), std::string("(NVIDIA H200), ") + commits + ", 2026-11-22");
  };
  CHECK(says("commits abc1234, 0ld0ne5 (PyTorch's)"));
  add(3, "fsdp.cu", "0ld0ne5"), add(4, "fsdp.cu", "def5678"), add(4, "PyTorch", "def5678");
  CHECK(says("commits abc1234, 0ld0ne5 (`8`), def5678 (`16`)"));
  for (int n = 5; n < 14; n++) add(n, "fsdp.cu", "abc1234"), add(n + 10, "fsdp.cu", "def5678");
  CHECK(says("commits abc1234, def5678 (10 rows), 0ld0ne5 (`8`)"));
}

TEST_CASE("every table of the documents can be made, and says what made it", "[tables]") {
  const ScratchDirectory dir;
  for (const Table& t : tables()) {
    INFO(t.name);
    const std::string text = render(t, dir.path);
    CHECK(text.rfind("Not measured yet: `./bench --sweep ", 0) == 0);
    for (const Column& c : t.columns) CHECK_NOTHROW(training_table(depth_rows(), companion({c})));
  }
  rows_in(dir, "depth-2gpu.jsonl", depth_rows());
  CHECK(has(render(find_table("depth"), dir.path),
            "\n\n`./bench --sweep depth --peer` on 2 GPUs (NVIDIA H200), commit abc1234, 2026-11-22: "
            "[depth-2gpu](results/depth-2gpu.jsonl).\n"));
  // What is planned stands where nothing was measured, and not where something was.
  json sixteen = result_row(9, "16", "fsdp.cu", 1279.5, 29326), four = result_row(1, "4", "fsdp.cu", 999, 999);
  sixteen["planned"] = four["planned"] = true;
  rows_in(dir, "depth-planned.jsonl", {four, sixteen});
  const std::string both = render(find_table("depth"), dir.path);
  CHECK(has(both, "*1,279.5*"));
  CHECK(has(both, "350.3"));
  CHECK(!has(both, "999"));
  CHECK(has(both, "`./bench --sweep depth --gpu h200 --ranks 2`, planned (NVIDIA H200)"));
  // But not what was planned for another chip.
  four["hardware"]["name"] = sixteen["hardware"]["name"] = "A100";
  rows_in(dir, "depth-planned.jsonl", {four, sixteen});
  CHECK(!has(render(find_table("depth"), dir.path), "1,279.5"));
  CHECK(has(render(find_table("depth"), dir.path), "350.3"));
  CHECK(
      has(render(find_table("depth-gpus"), dir.path), "\nNot measured yet: `./bench --sweep depth --peer` on 1 GPU; "));
  CHECK(has(error_of<UsageError>([] { find_table("dept"); }), "there is no table \"dept\"; did you mean depth?"));
  CHECK(figure("depth-2gpu 4 ours step_ms", dir.path) == "350.3");
  CHECK(figure("depth-2gpu 32 ours peak_mib", dir.path) == "91,204");
  CHECK(figure("depth-2gpu 4 ratio step_ms", dir.path) == "0.93");
  CHECK(figure("depth-2gpu 32 theirs step_ms", dir.path) == "OOM bwd");
  CHECK(figure("seq-2gpu 4 ours step_ms", dir.path) == "-");
  CHECK(error_of<UsageError>([&] { figure("depth-2gpu 5 ours step_ms", dir.path); }) ==
        "figure depth-2gpu 5 ours step_ms: there is no row \"5\"");
  CHECK(has(error_of<UsageError>([&] { figure("depth-2gpu 4 ours step", dir.path); }), "\"step\" is not known"));
  CHECK(has(error_of<UsageError>([&] { figure("depth-2gpu 4 step_ms", dir.path); }), "give FILE ROW WHO KEY"));
}

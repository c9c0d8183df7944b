// lib/program/summary.h: runs beside each other.
#include <string>
#include <vector>

#include "lib/program/files.h"
#include "lib/program/process.h"
#include "lib/program/summary.h"
#include "test/errors.h"
#include "test/result_rows.h"

using nlohmann::json;

namespace {

// 40 steps whose loss falls to `loss` and then alternates by `scatter` around it.
json run_of(const char* name, const char* who, double tokens, double mib, double loss, double scatter) {
  json losses = json::array();
  for (int i = 0; i < 40; i++) losses.push_back(i < 20 ? loss + 1 : loss + (i % 2 ? scatter : -scatter));
  return {{"sweep", "class"},
          {"row", name},
          {"who", who},
          {"losses", losses},
          {"result", {{"tokens_per_sec", tokens}, {"step_ms", 1e6 / tokens}, {"peak_mib", mib}}}};
}
std::string log_of(const std::vector<double>& losses, double peak) {
  std::string text =
      json({{"command", "./train"}, {"commit", "a"}, {"config", json::object()}, {"memory", {{"peak_mib", peak}}}})
          .dump() +
      "\n";
  for (size_t i = 0; i < losses.size(); i++)
    text += json({{"step", i + 1},
                  {"loss", losses[i]},
                  {"step_ms", i < 4 ? 100.0 : 10.0 + double(i % 2)},
                  {"tokens_per_sec", i < 4 ? 10.0 : 1000.0},
                  {"peak_mib", peak}})
                .dump() +
            "\n";
  return text;
}

}  // namespace

TEST_CASE("a summary of rows has the speed-up over the baseline and follows from it", "[summary]") {
  const ScratchDirectory dir;
  json failed = run_of("slow", "PyTorch", 1, 1, 1, 0);
  failed.erase("result"), failed["error"] = "OOM: no room";
  const std::string path = rows_in(
      dir, "class-2gpu.jsonl",
      {run_of("fsdp", "fsdp.cu", 2500, 900, 2.001, 0.01), run_of("ddp_fp32", "PyTorch", 500, 3100, 2, 0.01),
       run_of("ddp_fp32", "fsdp.cu", 1000, 3000, 2, 0.01), run_of("fast_and_bad", "fsdp.cu", 9000, 900, 2.1, 0.01),
       run_of("lean", "fsdp.cu", 2000, 500, 2, 0.01), run_of("large", "fsdp.cu", 8000, 90000, 2, 0.01), failed});
  const json s = summarize({path}, "");
  CHECK(s["over"] == "ddp_fp32, fsdp.cu");
  CHECK(s["runs"].size() == 7);
  CHECK(s["runs"][0]["speed_up"] == 2.5);
  CHECK(s["runs"][1]["speed_up"] == 0.5);
  CHECK(s["runs"][0]["best_loss"].get<double>() == Approx(1.991));
  CHECK(s["runs"][0]["tail_loss"].get<double>() == Approx(2.001).margin(0.003));
  // Of the last losses, as of a sample.
  const json run = run_of("", "", 1, 1, 2.001, 0.01);
  const auto losses = run["losses"].get<std::vector<double>>();
  const std::vector<double> tail(losses.end() - s["runs"][0]["tail_steps"].get<int64_t>(), losses.end());
  double mean = 0, square = 0;
  for (double l : tail) mean += l / double(tail.size());
  for (double l : tail) square += (l - mean) * (l - mean);
  CHECK(s["runs"][0]["tail_loss_deviation"].get<double>() ==
        Approx(std::sqrt(square / double(tail.size() - 1))).epsilon(1e-6));
  const std::string text = s["recommendation"];
  CHECK(text.rfind("Choose fsdp, fsdp.cu: 2,500 tokens/s (x 2.50), 900 MiB, loss 2.00", 0) == 0);
  CHECK(has(text, "fastest of the 4 runs"));
  CHECK(has(text, "Where memory is short: lean, fsdp.cu: 2,000 tokens/s"));
  CHECK(has(text, "fast_and_bad, fsdp.cu (its loss is 2.1"));
  CHECK(has(text, "large, fsdp.cu (90,000 MiB are more than 81,920)"));
  CHECK(has(text, "slow, PyTorch (OOM)"));
  CHECK(summarize({path}, "ddp_fp32, PyTorch")["runs"][0]["speed_up"] == 5);
  CHECK(summarize({path}, "lean")["runs"][0]["speed_up"] == 1.25);
  CHECK(has(error_of<UsageError>([&] { summarize({path}, "none"); }),
            "--over none: choose one of: fsdp, fsdp.cu; ddp_fp32, PyTorch"));
  CHECK(has(error_of<UsageError>([&] { summarize({path}, "slow"); }), "--over slow: this run has no speed: OOM"));
  CHECK(has(summary_markdown(s), "| fsdp         | fsdp.cu |    2,500 |   x 2.50 |"));
}

TEST_CASE("a run is called by its file, without directory and ending", "[summary]") {
  CHECK(files::stem("./baseline") == "baseline");
  CHECK(files::stem("run.1/training") == "training");
  CHECK(files::stem("/runs/a.b.jsonl") == "a.b");
  CHECK(files::stem("runs/.hidden") == ".hidden");
}

TEST_CASE("what was planned has no speed-up over what was measured", "[summary]") {
  const ScratchDirectory dir;
  json planned = run_of("planned", "fsdp.cu", 4000, 900, 2, 0.01), more = planned;
  planned["planned"] = more["planned"] = true, more["row"] = "more", more["result"]["tokens_per_sec"] = 8000;
  const std::string path = rows_in(
      dir, "class-2gpu.jsonl",
      {planned, run_of("one", "fsdp.cu", 1000, 900, 2, 0.01), run_of("two", "fsdp.cu", 2000, 900, 2, 0.01), more});
  const json s = summarize({path}, ""), of_planned = summarize({path}, "planned");
  CHECK(s["over"] == "one, fsdp.cu");
  CHECK(s["runs"][2]["speed_up"] == 2);
  for (int i : {0, 3}) CHECK(!s["runs"][i].contains("speed_up"));
  CHECK(of_planned["runs"][3]["speed_up"] == 2);
  for (int i : {1, 2}) CHECK(!of_planned["runs"][i].contains("speed_up"));
}

TEST_CASE("a summary of logs leaves the first steps out, and tells a loss that is not a number", "[summary]") {
  const ScratchDirectory dir;
  const std::string a = dir.file("a.jsonl", log_of({5, 4, 3, 2.5, 2.4, 2.3, 2.2, 2.1, 2.0, 2.05}, 1234)),
                    b = dir.file("b.jsonl", log_of({5, 4, 3, 2, 1.5, 2, 2, 2, 2, std::nan("")}, 4321)),
                    torch = dir.file("torch.jsonl",
                                     "{\"ok\": true, \"tok_s\": 500, \"peak_alloc_mib\": 99, "
                                     "\"loss_last\": 2.5}\n{\"ok\": false, \"error\": \"OOM\"}\n");
  const json s = summarize({a, b, torch}, "");
  CHECK(s["over"] == "a, fsdp.cu");
  CHECK(s["runs"][0]["median_tokens_per_sec"] == 1000);
  CHECK(s["runs"][0]["step_ms"] == 10.5);
  CHECK(s["runs"][0]["final_loss"] == 2.05);
  CHECK(s["runs"][0]["best_loss"] == 2.0);
  CHECK(s["runs"][0]["peak_mib"] == 1234);
  CHECK(s["runs"][1]["final_loss"] == "NaN");
  CHECK(s["runs"][1]["best_loss"] == 1.5);
  CHECK(s["runs"][1]["tail_loss"] == "NaN");
  CHECK(s["runs"][2]["speed_up"] == 0.5);
  CHECK(s["runs"][3]["error"] == "OOM");
  CHECK(has(s["recommendation"].get<std::string>(), "b, fsdp.cu (its loss is NaN ± NaN)"));
  CHECK(json::parse(s.dump()) == s);
  const std::string out = dir / "summary.json";
  CHECK(print_summary({a, torch}, "a", out) == 0);
  CHECK(json::parse(read_file(out))["over"] == "a, fsdp.cu");
}

TEST_CASE("a file that has no runs is refused in a line", "[summary]") {
  const ScratchDirectory dir;
  CHECK(error_of<UsageError>([&] { summarize({dir / "none"}, ""); }) == dir / "none" + " cannot be read");
  CHECK(has(error_of<UsageError>([&] { summarize({dir.file("empty", "")}, ""); }), "/empty has no line of JSON"));
  CHECK(has(error_of<UsageError>([&] { summarize({dir.file("text", "hello\n")}, ""); }), "/text has no line of JSON"));
  CHECK(has(error_of<UsageError>([&] { summarize({dir.file("other", "{\"a\": 1}\n")}, ""); }),
            "/other is no training log"));
  CHECK(has(error_of<UsageError>([&] { summarize({dir.file("log", log_of({}, 1))}, ""); }), "no run here has a speed"));
}

// lib/program/plots.h: what gnuplot is told, and the pictures that come out.
#include <cmath>
#include <cstdlib>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <unistd.h>

#include "lib/program/files.h"
#include "lib/program/plots.h"
#include "lib/program/process.h"
#include "test/errors.h"
#include "test/result_rows.h"

using nlohmann::json;

namespace {

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) n++;
  return n;
}

json span(const char* cat, const char* name, double ts, double dur, json args = json::object()) {
  return {{"ph", "X"}, {"cat", cat}, {"name", name}, {"pid", 1}, {"tid", 1}, {"ts", ts}, {"dur", dur}, {"args", args}};
}
// A step of 10 ms: a gather beside the forward pass, a reduction beside the backward pass, and two changes of memory.
std::string trace_text() {
  const json trace = {
      {"otherData", {{"source", "plan"}, {"ranks", 4}, {"begin_us", 1000}, {"end_us", 11000}}},
      {"traceEvents",
       {{{"ph", "M"}, {"name", "process_name"}, {"pid", 1}, {"args", {{"name", "streams"}}}},
        span("compute", "MLP", 1000, 4000),
        span("compute", "waiting for gathers", 5000, 500, {{"kind", "wait"}}),
        span("compute", "gemm", 5500, 2000, {{"kind", "kernel"}, {"mark", "MLP, backward"}}),
        span("compute", "gelu", 7500, 2500, {{"kind", "kernel"}, {"mark", "MLP, backward"}}),
        span("compute", "optimizer", 10000, 1000),
        span("gather", "all_gather", 500, 1500, {{"kind", "collective"}, {"unit", "block.1"}}),
        span("reduce", "reduce_scatter", 8000, 2000, {{"kind", "collective"}, {"unit", "block.1"}}),
        span("nccl", "ncclDevKernel", 8000, 2000),
        span("compute", "of the next step", 12000, 1000),
        {{"ph", "C"}, {"name", "memory, MiB"}, {"ts", 1000}, {"args", {{"master", 100}, {"activations", 0}}}},
        {{"ph", "C"}, {"name", "memory, MiB"}, {"ts", 3000}, {"args", {{"master", 100}, {"activations", 300}}}},
        {{"ph", "C"}, {"name", "memory, MiB"}, {"ts", 9000}, {"args", {{"master", 100}, {"activations", 50}}}}}}};
  return trace.dump();
}
std::string script(const Words& files, PlotKind kind = PlotKind::automatic, const char* key = "") {
  PlotRequest r;
  r.files = files, r.kind = kind, r.key = key;
  return plot_script(r, "out.svg");
}
std::string log_text(const std::vector<double>& losses) {
  std::string text = json({{"command", "./train"}, {"commit", "a"}, {"config", json::object()}}).dump() + "\n";
  for (size_t i = 0; i < losses.size(); i++)
    text += json({{"step", i + 1}, {"loss", losses[i]}, {"step_ms", 1}}).dump() + "\n";
  return text;
}
bool have_gnuplot() {
  const ScratchDirectory dir;
  return run({"gnuplot", "--version"}, dir / "said", 20).empty();
}

}  // namespace

TEST_CASE("a timeline has the spans of the step in its lanes", "[plots]") {
  const ScratchDirectory dir;
  const std::string text = script({dir.file("trace.json", trace_text())});
  CHECK(has(text, "set xrange [0:10.0000]"));
  CHECK(has(text, "\"A step on 4 GPUs, planned\""));
  CHECK(has(text, "$forward << EOD\n0.0000 4.0000 2.64 3.36\nEOD"));
  CHECK(has(text, "$backward << EOD\n4.5000 9.0000 2.64 3.36\nEOD"));  // two kernels of one operation are one bar
  CHECK(has(text, "$waits << EOD\n4.0000 4.5000 2.64 3.36\nEOD"));
  CHECK(has(text, "$AdamW << EOD\n9.0000 10.0000 2.64 3.36\nEOD"));
  CHECK(has(text, "$gather << EOD\n0.0000 1.0000 1.64 2.36\nEOD"));  // what began before the step is cut
  CHECK(has(text, "$reduce << EOD\n7.0000 9.0000 0.64 1.36\nEOD"));
  CHECK(count(text, "set label \"block.1\"") == 2);
  CHECK(has(text, "set ytics (\"compute\" 3, \"gathers\" 2, \"reductions\" 1)"));
}

TEST_CASE("a timeline of a plan has its slots under its lanes", "[plots]") {
  const ScratchDirectory dir;
  json trace = json::parse(trace_text());
  trace["otherData"]["command"] = "./train --plan --preset tiny --world 4";
  json& events = trace["traceEvents"];
  const auto add = [&](const char* slot, const char* holds, double ts, double dur) {
    events.push_back(span("slot", holds, ts, dur, {{"kind", "slot"}, {"mark", slot}}));
  };
  add("gather slot 0", "block.1", 500, 4500);
  add("gather slot 0", "block.1, resident", 5000, 6000);
  add("gradient slot 0", "block.1", 6000, 4000);
  const std::string text = script({dir.file("trace.json", trace.dump())});
  CHECK(has(text, "\"A step of tiny on 4 GPUs, planned\""));
  CHECK(has(text,
            "set ytics (\"compute\" 5, \"gathers\" 4, \"reductions\" 3, \"gather slot 0\" 2, "
            "\"gradient slot 0\" 1)"));
  CHECK(has(text, "$held << EOD\n0.0000 4.0000 1.64 2.36\nEOD"));
  CHECK(has(text, "$resident << EOD\n4.0000 10.0000 1.64 2.36\nEOD"));
  CHECK(has(text, "$gradient << EOD\n5.0000 9.0000 0.64 1.36\nEOD"));
  CHECK(count(text, "set label \"block.1\"") == 4);  // a resident unit has its label in the bar before
  for (int i = 1; i < 12; i++) add(("gather slot " + std::to_string(i)).c_str(), "block.2", 1000, 1000);
  CHECK_FALSE(has(script({dir.file("many.json", trace.dump())}), "slot"));  // more than there is room for
}

TEST_CASE("gnuplot runs nothing of what a title says", "[plots]") {
  const ScratchDirectory dir;
  PlotRequest r;
  r.files = {dir.file("trace.json", trace_text())}, r.title = "a `touch x` \\ \"b\"";
  CHECK(has(plot_script(r, "out.svg"), "set title \"a \\`touch x\\` \\\\ \\\"b\\\"\""));
}

TEST_CASE("memory is stacked, with what stays at the bottom", "[plots]") {
  const ScratchDirectory dir;
  const std::string text = script({dir.file("trace.json", trace_text())}, PlotKind::memory);
  CHECK(has(text,
            "$memory << EOD\n0.0000 100.00 100.00\n2.0000 100.00 100.00\n2.0000 100.00 400.00\n8.0000 100.00 400.00\n"
            "8.0000 100.00 150.00\n10.0000 100.00 150.00\nEOD"));
  CHECK(has(text, "set label \"400 MiB\" at 2.0000,400.00"));
  CHECK(has(text, "title \"master\""));
}

TEST_CASE("loss curves leave out what is not a number", "[plots]") {
  const ScratchDirectory dir;
  const std::string log = dir.file("a.jsonl", log_text({5, std::nan(""), 3}));
  CHECK(has(script({log}, PlotKind::loss), "$curve0 << EOD\n1 5\n3 3\nEOD"));
  CHECK(has(script({log}, PlotKind::loss), "title \"a\""));
  json row = result_row(1, "4", "PyTorch", 1, 1);
  row["losses"] = {2.5, nullptr, 2};
  CHECK(has(script({log, rows_in(dir, "rows.jsonl", {row})}, PlotKind::loss), "$curve1 << EOD\n1 2.5\n3 2\nEOD"));
  const std::string none = dir.file("none.jsonl", log_text({std::nan("")}));
  CHECK(error_of<UsageError>([&] { script({none}, PlotKind::loss); }) == none + " has no losses to plot");
}

TEST_CASE("no two of many curves look alike", "[plots]") {
  const ScratchDirectory dir;
  Words logs;
  for (int i = 0; i < 20; i++) logs.push_back(dir.file("run" + std::to_string(i) + ".jsonl", log_text({5, 3})));
  std::istringstream lines(script(logs, PlotKind::loss));
  std::set<std::string> styles;
  for (std::string line; std::getline(lines, line);)
    if (const size_t at = line.find("dashtype"); at != std::string::npos)
      styles.insert(line.substr(at, line.find(" title") - at));
  CHECK(styles.size() == logs.size());
}

TEST_CASE("a log is drawn as loss, gradient norm and tokens/s by step", "[plots]") {
  const ScratchDirectory dir;
  const json header = {{"command", "./train"}, {"commit", "a"}, {"config", json::object()}};
  const auto step = [](int n, double loss) {
    return json{{"step", n}, {"loss", loss}, {"grad_norm", 2 * loss}, {"tokens_per_sec", 100 * n}};
  };
  json validated = step(2, 4);
  validated["val_loss"] = 4.5;
  // Step 3 was made twice, from a checkpoint of step 2 on; the last line was cut by what killed the run.
  const std::string text = header.dump() + "\n" + step(1, std::nan("")).dump() + "\n" + validated.dump() + "\n" +
                           step(3, 9).dump() + "\n" + step(4, 9).dump() + "\n" + header.dump() + "\n" +
                           step(3, 3).dump() + "\n{\"step\": 4, \"lo";
  const std::string log = dir.file("a.jsonl", text), drawn = script({log});
  CHECK(has(drawn, "$loss0 << EOD\n2 4\n3 3\nEOD"));
  CHECK(has(drawn, "$val_loss0 << EOD\n2 4.5\nEOD"));
  CHECK(has(drawn, "$grad_norm0 << EOD\n2 8\n3 6\nEOD"));
  CHECK(has(drawn, "$tokens_per_sec0 << EOD\n1 100\n2 200\n3 300\nEOD"));
  CHECK(has(drawn, "layout 3,1 title \"a\""));
  // Several in one picture. What a log has not got leaves its panel out; names that are alike are told apart.
  std::filesystem::create_directory(dir / "b");
  const std::string other = dir.file("b/a.jsonl", log_text({5, std::nan(""), 3})), both = script({log, other});
  CHECK(has(both, "$loss1 << EOD\n1 5\n\n3 3\nEOD"));
  CHECK(has(both, "title \"" + other + "\""));
  CHECK(!has(both, "$grad_norm1"));
  CHECK(has(script({other}), "layout 1,1"));
  const std::string none = dir.file("none.jsonl", header.dump() + "\n");
  CHECK(error_of<UsageError>([&] { script({none}); }) == none + " has no steps to plot");
  CHECK(has(error_of<UsageError>([&] {
              script({log, rows_in(dir, "rows.jsonl", depth_rows())});
            }),
            "rows.jsonl is not a log"));
}

TEST_CASE("a sweep over numbers is lines of theirs, PyTorch's and ours", "[plots]") {
  const ScratchDirectory dir;
  const std::string path = rows_in(dir, "depth-2gpu.jsonl", depth_rows()), text = script({path});
  CHECK(has(text, "$measured0 << EOD\n4 1119\nEOD"));
  CHECK(has(text, "title \"theirs, 2 x A100 SXM\""));
  CHECK(has(text, "$measured2 << EOD\n4 350.25\n32 2521.64\nEOD"));
  CHECK(has(text, "$planned2 << EOD\n32 2521.64\n64 5100.5\nEOD"));
  CHECK(has(text, "set label \"OOM bwd\" at 32,"));
  CHECK(has(text, "set logscale x"));
  CHECK(has(script({path}, PlotKind::automatic, "peak_mib"), "$measured2 << EOD\n4 11078\n32 91204\nEOD"));
  CHECK(has(error_of<UsageError>([&] { script({path}, PlotKind::automatic, "none"); }), "no row has none"));
}

TEST_CASE("rows with words are bars", "[plots]") {
  const ScratchDirectory dir;
  std::vector<json> rows = {result_row(1, "none", "fsdp.cu", 300, 1), result_row(2, "both", "fsdp.cu", 350, 1)};
  rows[0]["theirs"] = {{"step_ms", 974}}, rows[1]["theirs"] = {{"text", "OOM"}};
  const std::string text = script({rows_in(dir, "recompute.jsonl", rows)});
  CHECK(has(text, "$series0 << EOD\n-0.2000 974 0.3680\nEOD"));
  CHECK(has(text, "$series1 << EOD\n0.2000 300 0.3680\n1.2000 350 0.3680\nEOD"));
  CHECK(has(text, "set label \"OOM\" at 0.8000,0 rotate"));
  CHECK(has(text, "set xtics (\"none\" 0, \"both\" 1)"));
}

TEST_CASE("what is all zero is drawn", "[plots]") {
  const ScratchDirectory dir;
  std::vector<json> rows = depth_rows();
  for (json& row : rows) row["result"]["nccl_share"] = 0;
  const std::string path = rows_in(dir, "depth.jsonl", rows);
  for (const PlotKind kind : {PlotKind::scaling, PlotKind::bars}) {
    const std::string text = script({path}, kind, "nccl_share");
    CHECK(has(text, "set yrange [0:1]"));
    CHECK(has(text, "set ytics (\"0\" 0, \"0.2\" 0.2, "));
  }
}

TEST_CASE("the picture of a unit has its parameters and cuts", "[plots]") {
  const std::string svg = unit_svg("rope", 4);
  CHECK(has(svg, "cut for 4 ranks"));
  CHECK(count(svg, "stroke-dasharray") == 3);
  CHECK(has(svg, ">mlp.up</text>"));
  CHECK(has(svg, "rank 1 owns 66 % of mlp.up</text>"));
  CHECK(unit_svg("rope", 4) == svg);
  CHECK(unit_svg("rope", 2) != svg);
  CHECK(has(error_of<UsageError>([] { unit_svg("rope", 0); }), "1 to 16 ranks"));
}

TEST_CASE("what cannot be plotted is refused in a line", "[plots]") {
  const ScratchDirectory dir;
  PlotRequest r;
  CHECK(error_of<UsageError>([&] { plot(r); }) == "--plot: name a file, or --kind unit");
  CHECK(error_of<UsageError>([] { plot_kind("pie"); }) ==
        "--kind pie: choose one of timeline, memory, curves, loss, bars, scaling, unit");
  CHECK(error_of<UsageError>([&] { script({dir / "none"}); }) == dir / "none" + " cannot be read");
  CHECK(error_of<UsageError>([&] { script({dir.file("empty", "")}); }) == dir / "empty" + " is empty");
  CHECK(has(error_of<UsageError>([&] { script({dir.file("text", "hello\n")}); }), "not a row of ./bench --sweep"));
  CHECK(has(error_of<UsageError>([&] { script({dir.file("text", "hello\n")}, PlotKind::timeline); }),
            "/text is not a trace"));
  const std::string empty_trace = dir.file("t.json", "{\"traceEvents\": []}");
  CHECK(error_of<UsageError>([&] { script({empty_trace}); }) == empty_trace + ": a trace without spans");
  r.kind = PlotKind::unit, r.out = "/nonexistent/unit.svg";
  CHECK(error_of<files::FileError>([&] { plot(r); }) == "/nonexistent/unit.svg: there is no directory /nonexistent");
  r.kind = PlotKind::automatic, r.files = {dir.file("log.svg", log_text({1, 2}))}, r.out = r.files[0];
  CHECK(has(error_of<UsageError>([&] { plot(r); }), "is the file to plot"));
  r.out = dir / "a.png";
  CHECK(error_of<UsageError>([&] { plot(r); }) ==
        "--out " + r.out + ": a picture is SVG; give a name that ends in .svg");
  const std::string path = std::getenv("PATH");
  ::setenv("PATH", dir.path.c_str(), 1);
  r.out = dir / "a.svg";
  const std::string missing = error_of<UsageError>([&] { plot(r); });
  ::setenv("PATH", path.c_str(), 1);
  CHECK(has(missing, "apt-get install gnuplot-nox"));
  // One that ends well with half a picture, as on a full disk: the picture that was there stays.
  const std::string program =
      dir.file("gnuplot", "#!/bin/sh\nprintf '<svg>' >\"$(sed -n \"s/^set output .\\(.*\\).$/\\1/p\" \"$1\")\"\n");
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  dir.file("a.svg", "<svg>old</svg>\n");
  ::setenv("PATH", (dir.path + ":" + path).c_str(), 1);
  const std::string half = error_of([&] { plot(r); });
  ::setenv("PATH", path.c_str(), 1);
  CHECK(has(half, "gnuplot: the picture breaks off; is there room in "));
  CHECK(read_file(r.out) == "<svg>old</svg>\n");
  // By a link the file that it leads to.
  std::filesystem::create_symlink("a.svg", dir / "link.svg");
  r = {}, r.kind = PlotKind::unit, r.out = dir / "link.svg";
  plot(r);
  CHECK(std::filesystem::is_symlink(r.out));
  CHECK(has(read_file(dir / "a.svg"), "</svg>"));
  CHECK(!has(read_file(dir / "a.svg"), ">old<"));
}

TEST_CASE("gnuplot takes every kind, and makes the same picture twice", "[plots]") {
  if (!have_gnuplot()) SKIP_TEST("no gnuplot here");
  const ScratchDirectory dir;
  const std::string trace = dir.file("trace.json", trace_text()), rows = rows_in(dir, "depth.jsonl", depth_rows()),
                    log = dir.file("log \"1\".jsonl", log_text({5, std::nan(""), 3}));
  for (const auto& [file, kind] : std::vector<std::pair<std::string, PlotKind>>{{trace, PlotKind::timeline},
                                                                                {trace, PlotKind::memory},
                                                                                {log, PlotKind::curves},
                                                                                {log, PlotKind::loss},
                                                                                {rows, PlotKind::bars},
                                                                                {rows, PlotKind::scaling}}) {
    INFO(file << " " << int(kind));
    PlotRequest r;
    r.files = {file}, r.kind = kind, r.out = dir / "a.svg";
    REQUIRE_NOTHROW(plot(r));
    const std::string once = read_file(r.out);
    CHECK(once.find("<svg") != std::string::npos);
    CHECK(once.find("</svg>") != std::string::npos);
    plot(r);
    CHECK(read_file(r.out) == once);
  }
  std::filesystem::create_directory(dir / "results");
  rows_in(dir, "results/depth-2gpu.jsonl", depth_rows());
  CHECK(make_pictures(dir / "results") == 0);
  for (const char* name : {"unit.svg", "depth.svg", "depth-memory.svg"})
    CHECK(std::filesystem::exists(dir / "results" + "/" + name));
  CHECK(!std::filesystem::exists(dir / "results/seq.svg"));
}

TEST_CASE("the notes show every picture that is made", "[plots]") {
  const std::string notes = read_file("NOTES.md");
  REQUIRE(!notes.empty());
  for (const Picture& p : pictures()) {
    const std::string path = strf("results/%s.svg", p.name);
    INFO(path);
    const bool made = access(path.c_str(), F_OK) == 0, shown = notes.find("(" + path + ")") != std::string::npos;
    CHECK(made == shown);
  }
}

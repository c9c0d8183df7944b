// lib/program/notes.h: what stands between markers is what results/ has.
#include <string>
#include <vector>

#include "lib/program/notes.h"
#include "lib/program/process.h"
#include "lib/program/tables.h"
#include "test/errors.h"
#include "test/result_rows.h"

using nlohmann::json;

namespace {

std::string refusal(const std::string& document) {
  return error_of<UsageError>([&] { written_anew(document, "N.md", "/nonexistent"); });
}

}  // namespace

TEST_CASE("tables and figures are written between their markers", "[notes]") {
  const ScratchDirectory dir;
  std::filesystem::create_directory(dir / "results");
  rows_in(dir, "results/depth-2gpu.jsonl", depth_rows());
  const std::string before =
      "# Notes\n\n<!-- table depth -->\nold\n<!-- end -->\nA step takes <!-- figure depth-2gpu 4 ours step_ms "
      "-->1<!-- end --> ms, <!-- figure depth-2gpu 4 ours mfu --><!-- end -->.\n";
  const std::string notes = dir.file("NOTES.md", before), results = dir / "results";
  const std::string after = written_anew(before, notes, results);
  CHECK(after == "# Notes\n\n<!-- table depth -->\n" + render(find_table("depth"), results) +
                     "<!-- end -->\nA step takes <!-- figure depth-2gpu 4 ours step_ms -->350.3<!-- end --> ms, "
                     "<!-- figure depth-2gpu 4 ours mfu -->52.1 %<!-- end -->.\n");
  CHECK(has(after, "](results/depth-2gpu.jsonl)"));
  CHECK(written_anew(after, notes, results) == after);
  // A document that lies beside the rows links to them from there.
  CHECK(has(written_anew(before, results + "/README.md", results), "](depth-2gpu.jsonl)"));

  CHECK(notes_differences(notes, results).size() == 3);
  CHECK(check_notes({notes}, results) == 1);
  CHECK(write_notes({notes}, results) == 0);
  CHECK(read_file(notes) == after);
  CHECK(notes_differences(notes, results).empty());
  CHECK(check_notes({notes}, results) == 0);

  // One digit, in the text or in the rows.
  std::string wrong = after;
  wrong.replace(wrong.find("14,550"), 6, "14,551");
  dir.file("NOTES.md", wrong);
  std::vector<NotesDifference> d = notes_differences(notes, results);
  REQUIRE(d.size() == 1);
  CHECK(d[0].marker == "table depth");
  CHECK(d[0].line == 6);
  CHECK(has(d[0].written, "14,551"));
  CHECK(has(d[0].generated, "14,550"));
  dir.file("NOTES.md", after);
  std::vector<json> rows = depth_rows();
  rows[2]["result"]["step_ms"] = 350.36;
  rows_in(dir, "results/depth-2gpu.jsonl", rows);
  CHECK(notes_differences(notes, results).size() == 2);  // the table and the figure
}

TEST_CASE("code shows markers and has none", "[notes]") {
  const std::string text = "```\n<!-- table none -->\n```\n`<!-- figure x -->` is a marker\nno newline";
  CHECK(written_anew(text, "N.md", "/nonexistent") == text);
}

TEST_CASE("a table whose file is not there says what makes it", "[notes]") {
  CHECK(written_anew("<!-- table depth -->\n<!-- end -->\n", "N.md", "/nonexistent") ==
        "<!-- table depth -->\nNot measured yet: `./bench --sweep depth --peer` on 2 GPUs.\n<!-- end -->\n");
}

TEST_CASE("a wrong marker is told by its line", "[notes]") {
  CHECK(has(refusal("x\n<!-- table depht -->\n<!-- end -->\n"), "N.md, line 2: there is no table \"depht\""));
  CHECK(refusal("<!-- table depth -->\n|\n") == "N.md, line 1: a table's marker without <!-- end --> below it");
  CHECK(refusal("<!-- table depth -->\n<!-- table seq -->\n<!-- end -->\n") ==
        "N.md, line 1: a table's marker without <!-- end --> below it");
  CHECK(refusal("<!-- table depth --> x\n<!-- end -->\n") ==
        "N.md, line 1: a table's marker stands on a line of its own: <!-- table NAME -->");
  CHECK(refusal("\nA <!-- figure depth-2gpu 4 ours step_ms -->1\n<!-- end -->\n") ==
        "N.md, line 2: a figure's marker needs <!-- end --> after it on the same line");
  CHECK(has(refusal("\n<!-- figure depth-2gpu -->1<!-- end -->\n"), "N.md, line 2: figure depth-2gpu: give FILE ROW"));
  CHECK(error_of<UsageError>([] { notes_differences("/nonexistent/N.md", "."); }) ==
        "/nonexistent/N.md cannot be read");
}

TEST_CASE("documents stay as they are where there are no results", "[notes]") {
  const ScratchDirectory dir;
  const std::string measured = "<!-- table depth -->\n| 4 | 57.7 |\n<!-- end -->\n",
                    document = dir.file("N.md", measured);
  for (auto* notes : {write_notes, check_notes})
    CHECK(error_of<UsageError>([&] { notes({document}, dir / "results"); }) ==
          "--notes: there is no " + dir / "results" + "/ here; run it in the project's directory");
  CHECK(read_file(document) == measured);
  // Nor is a table written over whose rows alone are gone; one that was never measured is written anew.
  std::filesystem::create_directory(dir / "results");
  rows_in(dir, "results/depth-2gpu.jsonl", depth_rows());
  CHECK(write_notes({document}, dir / "results") == 0);
  const std::string with_rows = read_file(document);
  std::filesystem::remove(dir / "results/depth-2gpu.jsonl");
  CHECK(has(error_of<UsageError>([&] { write_notes({document}, dir / "results"); }),
            "N.md, line 2: table depth was made of " + dir / "results/depth-2gpu.jsonl" + ", which is not there"));
  CHECK(read_file(document) == with_rows);
  const std::string fresh = dir.file("fresh.md", "<!-- table depth -->\n<!-- end -->\n");
  CHECK(write_notes({fresh}, dir / "results") == 0);
  CHECK(has(read_file(fresh), "Not measured yet"));
  CHECK(error_of<UsageError>([&] { write_notes({dir.path}, dir.path); }) == dir.path + " is not a document");
}

TEST_CASE("the documents have what results/ has", "[notes]") {
  for (const char* document : {"NOTES.md", "README.md", "results/README.md"}) {
    REQUIRE(std::filesystem::exists(document));  // tests run where they lie
    for (const NotesDifference& d : notes_differences(document, "results")) {
      INFO(document << ":" << d.line << ": " << d.marker << ": run `make notes`");
      CHECK(d.written == d.generated);
    }
  }
}

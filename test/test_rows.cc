// Rows of results: what every row says of itself, and the table.
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include <unistd.h>

#include "lib/device/error.h"
#include "lib/program/rows.h"
#include "test/catch.h"

TEST_CASE("rows say when, by what and from which commit they were made", "[rows]") {
  const std::string path = strf("build/test-rows-%d.jsonl", int(getpid()));
  const RowFile file = {path, "./bench --sweep depth", "abc1234"};
  file.require_writable();
  CHECK(access(path.c_str(), F_OK) != 0);  // no file without rows
  file.append({{"depth", 4}});
  file.append({{"depth", 8}, {"command", "./train"}, {"commit", "def5678"}});
  file.require_writable();
  std::ofstream(path, std::ios::app) << "[1, 2]\nnot JSON\n";
  const std::vector<nlohmann::json> rows = read_json_lines(path);
  std::remove(path.c_str());
  REQUIRE(rows.size() == 2);  // the second check of the file kept what it holds
  CHECK(rows[0]["depth"] == 4);
  CHECK(rows[0]["command"] == "./bench --sweep depth");
  CHECK(rows[0]["commit"] == "abc1234");
  CHECK(rows[1]["command"] == "./train");
  CHECK(rows[1]["commit"] == "def5678");
  for (const nlohmann::json& row : rows) CHECK(row["date"].get<std::string>().size() == 24);
  CHECK_THROWS_AS((RowFile{"/nonexistent/rows.jsonl", "", ""}.require_writable()), UsageError);
}

TEST_CASE("the median and the spread of figures", "[rows]") {
  CHECK(median({}) == -1);
  CHECK(median({3, 1, 2}) == 2);
  CHECK(median({4, 1, 3, 2}) == 2.5);
  CHECK(spread("ms", {4, 1, 3, 2}) == nlohmann::json{{"ms", 2.5}, {"ms_min", 1.0}, {"ms_max", 4.0}});
}

TEST_CASE("a table aligns words to the left and figures to the right", "[rows]") {
  CHECK(
      markdown({{"knobs", "ms", "slowdown", "note"}, {"as it is", "9.5", "x 1.02", ""}, {"`--a|b`", "-", "-", "-a"}}) ==
      "| knobs    |  ms | slowdown | note |\n"
      "| -------- | --: | -------: | ---- |\n"
      "| as it is | 9.5 |   x 1.02 |      |\n"
      "| `--a/b`  |   - |        - | -a   |\n");
}

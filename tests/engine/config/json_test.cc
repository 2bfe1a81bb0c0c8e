// JSON and Hjson: syntax errors with positions, duplicate keys, comments, UTF-8, nesting, files that are
// none.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "engine/config/check.h"
#include "engine/config/document/document.h"
#include "tests/engine/config/config_testing.h"

namespace tessera::config {
namespace {

using nlohmann::json;

std::string error_in(std::string_view text) {
  return config_error([&] { parse_document(text, "c.json"); });
}

TEST(ConfigJson, NestingIsLimitedNotOverflowing) {
  std::string deepest(kMaxJsonDepth - 1, '[');
  EXPECT_EQ(error_in("{\"a\": " + deepest + std::string(kMaxJsonDepth - 1, ']') + "}"), "");
  EXPECT_EQ(error_in("{\"a\": [" + deepest + std::string(kMaxJsonDepth, ']') + "}"),
            "c.json:1:70: nested deeper than 64 levels");
  EXPECT_EQ(error_in(std::string(3'000'000, '[')), "c.json:1:65: nested deeper than 64 levels");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  EXPECT_EQ(error_in(objects), "c.json:1:321: nested deeper than 64 levels");
}

TEST(ConfigJson, CommentsAndByteOrderMarkAreAllowed) {
  Document document = parse_document(
      "\xef\xbb\xbf// head\n{ /* one */ \"a\": 1, // two\n  \"b\": \"/* no // comment */\" }\n// tail",
      "c.json");
  EXPECT_EQ(*document.json, json({{"a", 1}, {"b", "/* no // comment */"}}));
  EXPECT_EQ(document.origins.where("a"), "c.json:2");
  EXPECT_EQ(document.origins.where("b"), "c.json:3");
}

TEST(ConfigJson, OriginsKnowTheLineOfEveryKey) {
  Document hjson =
      parse_document("# of Hjson\na: {\n b: x\n\n 'c': '''\n two\n '''}\nd: [{e: 1}\n{e: 2}]", "c.hjson");
  for (const auto& [path, line] : {std::pair{"a", 2}, {"a.b", 3}, {"a.c", 5}, {"d", 8}, {"d[1].e", 9}})
    EXPECT_EQ(hjson.origins.where(path), "c.hjson:" + std::to_string(line)) << path;
  Document document = parse_document("{\n\"a\": {\n\"b\": [1, {\n\"c\": 1}]},\n\"d\": 2}", "c.json");
  EXPECT_EQ(document.origins.where("a"), "c.json:2");
  EXPECT_EQ(document.origins.where("a.b"), "c.json:3");
  EXPECT_EQ(document.origins.where("a.b[1].c"), "c.json:4");
  EXPECT_EQ(document.origins.where("a.b[0]"), "c.json:3");  // an element stands with its list
  EXPECT_EQ(document.origins.where("a.x.y"), "c.json:2");   // a missing key with its section
  EXPECT_EQ(document.origins.where("d"), "c.json:5");
  EXPECT_EQ(document.origins.where("x"), "c.json");
}

TEST(ConfigJson, FilesThatCannotBeRead) {
  auto folder = std::filesystem::path(testing::TempDir()) / "config_json_test";
  std::filesystem::create_directories(folder);
  auto file = [&](const char* name) { return (folder / name).string(); };
  std::ofstream(file("empty.json"));
  std::ofstream(file("large.json")) << std::string((16 << 20) + 1, ' ');
  std::ofstream(file("good.json")) << "{\"seed\": 1}";
  EXPECT_EQ(config_error([&] { read_document(folder.string()); }),
            folder.string() + ": is a folder; expected a JSON file");
  EXPECT_EQ(config_error([&] { read_document(file("none.json")); }),
            file("none.json") + ": cannot be opened (No such file or directory)");
  EXPECT_EQ(config_error([&] { read_document(file("empty.json")); }),
            file("empty.json") + ": is empty; expected a JSON object");
  EXPECT_EQ(config_error([&] { read_document(file("large.json")); }),
            file("large.json") + ": is larger than 16 MiB; expected a JSON configuration");
  EXPECT_EQ(*read_document(file("good.json")).json, json({{"seed", 1}}));
  std::filesystem::remove_all(folder);
}

TEST(ConfigJson, OverridesSetValuesAndCreateSections) {
  Document document = parse_document(R"({"a": {"b": 1}, "list": [{"x": 1}, 2], "none": null})", "c.json");
  apply_overrides(document, {"a.b=3", "a.c.d=true", "word=cpu", "text=a=b", "list[0].x=[1, 2]",
                             "list[1]=null", "none.k=1.5", "quoted=\"7\"", "bad={x", "empty="});
  EXPECT_EQ(*document.json, json({{"a", {{"b", 3}, {"c", {{"d", true}}}}},
                                  {"list", {{{"x", {1, 2}}}, nullptr}},
                                  {"none", {{"k", 1.5}}},
                                  {"word", "cpu"},
                                  {"text", "a=b"},
                                  {"quoted", "7"},
                                  {"bad", "{x"},
                                  {"empty", ""}}));
  EXPECT_EQ(document.origins.where("a.b"), "--set");
  EXPECT_EQ(document.origins.where("a.c"), "--set") << "a section that only the command line has";
  EXPECT_EQ(document.origins.where("a"), "c.json:1");
}

TEST(ConfigJson, OverridesUnderOtherNamesOfAKey) {
  KeyTable table;
  table.add(make_key(Type::kSection, "a", ""));
  table.add(make_key(Type::kInteger, "a.b", "", alias("a.bee"), alias("old_b")));
  table.add(make_key(Type::kSection, "c", "", alias("sea")));
  EXPECT_EQ(without_aliases({"a.bee=1", "old_b=a.bee", "sea.x=2", "seaside=3", "a.b=4", "none"}, table),
            (std::vector<std::string>{"a.b=1", "a.b=a.bee", "c.x=2", "seaside=3", "a.b=4", "none"}));
}

}  // namespace
}  // namespace tessera::config

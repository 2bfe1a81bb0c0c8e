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

TEST(ConfigJson, SyntaxErrorsNamePositionAndCause) {
  struct Case {
    std::string text, message;
  };
  const std::string unquoted =
      ", which without quotes is a text up to the end of its line; expected true, false, null or a number "
      "and "
      "then ',' or a new line, or the text in double quotes";
  const std::vector<Case> cases = {
      {"", "c.json: is empty; expected a JSON object"},
      {" \n\t ", "c.json: is empty; expected a JSON object"},
      {"\xef\xbb\xbf # a comment\r\n/* and\n one */ // more", "c.json: is empty; expected a JSON object"},
      {"[1]", "c.json: found [1] (a list); expected an object {…} of configuration keys"},
      {"3", "c.json:1:2: the text ends too early; expected ':' after a key"},
      {"a: 1\n}", "c.json:2:1: found '}'; expected a key"},
      {"a: 1\nb c: 2", "c.json:2:3: found 'c'; expected ':' after a key"},
      {"{\"a\": 1} x", "c.json:1:10: found 'x' after the end of the configuration"},
      {"{\"a\": 1}\n{", "c.json:2:1: found '{' after the end of the configuration"},
      {"{\"a\" 1}", "c.json:1:6: found '1'; expected ':' after a key"},
      {"{\"a\": 1,, \"b\": 2}", "c.json:1:9: found ','; expected a key in double quotes"},
      {"{a: 1,, b: 2}", "c.json:1:7: found ','; expected ',' or '}'"},
      {"{\"a\": [1}", "c.json:1:9: found '}'; expected ',' or ']'"},
      {"{\"a\": 1 \"b\": 2}", "c.json:1:9: found '\"b\"'; expected ',' or '}'"},
      {"{\r\n \"a\": {\"b\": 1,\r\n  \"c\": [1] },\r\n \"d\": 1 \"e\": {\"f\": 2}\r\n}\r\n",
       "c.json:4:9: found '\"e\"'; expected ',' or '}'"},
      {"{\"a\": [1,], # x\n 'é': 2, \"é\" 2, }", "c.json:2:14: found '2'; expected ':' after a key"},
      {"\xef\xbb\xbf{\"a\" 1}", "c.json:1:6: found '1'; expected ':' after a key"},
      {"{\"a\": [1 2]}", "c.json:1:10: found '2'; expected ',' or ']'"},
      {"{\"a\": [1, 2,\n \"b\": 3\n}", "c.json:2:5: found ':'; expected ',' or ']'"},
      {"{\"a\": \"x, \"b\": 2}", "c.json:1:12: found 'b'; expected ',' or '}'"},
      {"{a\": 2}", "c.json:1:2: found 'a'; expected a key in double quotes"},
      {"{\"a: 1,\n \"b\": 2}", "c.json:1:8: a string is not closed on its line; a '\"' is missing"},
      {"{\"a\": 01}", "c.json:1:7: found '01', which is no JSON number"},
      {"{\"a\": {\"b\": True},\n \"c\": 2\n}",
       "c.json:1:13: found 'True'; expected a JSON value (true, false, null, a number, \"text\", [list], "
       "{section})"},
      {"{\"a\": Adam\",\n \"c\": 2\n}",
       "c.json:1:7: found 'Adam'; expected a JSON value (true, false, null, a number, \"text\", [list], "
       "{section})"},
      {"a: 1\nb\": 2", "c.json:2:1: found 'b\"'; expected a key between quotes, or without; one is missing"},
      {"{\"t\": Adam\n \"a\": {b: True},\n \"c\": 2\n}", "c.json:2:11: found 'True},'" + unquoted},
      {"{\"a\": 1e999}", "c.json:1:7: found '1e999', a number too large for a double"},
      {"{\"a\": 1e-400}",
       "c.json:1:7: found '1e-400', a number too small for a double; expected 0, or one of at least 1e-308"},
      {"{\"a\": -0.0003e-900}",
       "c.json:1:7: found '-0.0003e-900', a number too small for a double; expected 0, or one of at least "
       "1e-308"},
      {"{\"a\": 1", "c.json:1:8: the text ends too early; a '}' is missing"},
      {"{\"a\": {\"b\": [1, 2", "c.json:1:18: the text ends too early; a ']' is missing"},
      {"{\"a\": {\"b\": 1},\n", "c.json:2:1: the text ends too early; a '}' is missing"},
      {"{\"a\": 1}\n}", "c.json:2:1: found '}' after the end of the configuration"},
      {"{\"a\": \"b", "c.json:1:9: the text ends inside a string"},
      {"{\"a\": \"b\n\"}", "c.json:1:9: a string is not closed on its line; a '\"' is missing"},
      {"{\"a\": \"\\q\"}",
       "c.json:1:9: invalid escape in a string; JSON knows \\\" \\\\ \\/ \\b \\f \\n \\r \\t \\uXXXX"},
      {"{\"a\": 1 /* }", "c.json:1:13: the text ends inside a comment"},
      {"{\"a\": \xff}", "c.json:1:7: byte 0xff is not valid UTF-8; expected a JSON text"},
      {"{\"a\": \"\xed\xa0\x80\"}", "c.json:1:8: byte 0xed is not valid UTF-8; expected a JSON text"},
      {"{\"a\": \"\xc0\xaf\"}", "c.json:1:8: byte 0xc0 is not valid UTF-8; expected a JSON text"},
      {std::string("{\"a\": 1}\0{", 10), "c.json:1:9: control character 0x00; expected a JSON text"},
      {"{\"a\": 1,\n \"b\": 2,\n \"a\": 3}", "c.json:3:4: a: this key is given twice; expected it once"},
      {"{\"a\": {\"b\": 1, \"b\": 2}}", "c.json:1:18: a.b: this key is given twice; expected it once"},
      {"{\"a\": [{}, {\"x\": 1, \"x\": 2}]}",
       "c.json:1:23: a[1].x: this key is given twice; expected it once"},
  };
  for (const Case& c : cases) EXPECT_EQ(error_in(c.text), c.message) << c.text;
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

TEST(ConfigJson, OverridesThatCannotBe) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"seed", "--set seed: expected PATH=VALUE, e.g. --set zero_optimization.stage=3"},
      {"=3", "--set =3: expected PATH=VALUE, e.g. --set zero_optimization.stage=3"},
      {"a..b=1", "--set a..b=1: expected PATH=VALUE with a path like zero_optimization.stage"},
      {"a.=1", "--set a.=1: expected PATH=VALUE with a path like zero_optimization.stage"},
      {"a[x]=1", "--set a[x]=1: expected PATH=VALUE with a path like zero_optimization.stage"},
      {"a[0=1", "--set a[0=1: expected PATH=VALUE with a path like zero_optimization.stage"},
      {"n.x=1", "--set n.x=1: n is 3 (a number), not a section with keys"},
      {"l[1]=1", "--set l[1]=1: l is [0] (a list), which has no element 1"},
      {"n[0]=1", "--set n[0]=1: n is 3 (a number), which has no element 0"},
  };
  for (const auto& [text, message] : cases) {
    Document document = parse_document(R"({"n": 3, "l": [0]})", "c.json");
    EXPECT_EQ(config_error([&] { apply_overrides(document, {text}); }), message);
  }
}

}  // namespace
}  // namespace tessera::config

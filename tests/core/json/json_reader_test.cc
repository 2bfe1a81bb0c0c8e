// The reader of JSON: which texts are JSON, held to nlohmann's own parser; the values that it gives; its
// limits.
#include "core/json/json_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

namespace tessera {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

std::string error_in(std::string_view text, const JsonOptions& options = {}) {
  try {
    parse_json(text, options);
  } catch (const JsonError& error) {
    return error.what();
  }
  return "";
}

TEST(JsonReader, TreesAreThoseOfNlohmann) {
  for (const std::string text : {"null",
                                 "true",
                                 " false ",
                                 "0",
                                 "-0",
                                 "7",
                                 "-7",
                                 "18446744073709551615",
                                 "18446744073709551616",
                                 "-9223372036854775808",
                                 "-9223372036854775809",
                                 "1.5",
                                 "1e3",
                                 "1E+3",
                                 "-2.5e-3",
                                 "5e-324",
                                 "2.0",
                                 "0.1",
                                 "123456789.123456789e-7",
                                 R"("")",
                                 R"("a\"\\\/\b\f\n\r\tz")",
                                 R"("\u00e9\ud83d\ude00\u0000")",
                                 "\"\xc3\xa9\xf0\x9f\x98\x80\x7f\"",
                                 "[]",
                                 "{}",
                                 "[[],{},[1,[2]]]",
                                 "\xef\xbb\xbf{}",
                                 R"({"a": {"b": [1, {"c": null}]}, "": 2})",
                                 "\r\n\t [1 , 2]\n"}) {
    const json mine = parse_json(text), expected = json::parse(text);
    EXPECT_EQ(mine, expected) << text;
    EXPECT_EQ(mine.type(), expected.type()) << text;
    EXPECT_EQ(mine.dump(), expected.dump()) << text;
    EXPECT_EQ(parse_ordered_json(text).dump(), nlohmann::ordered_json::parse(text).dump()) << text;
  }
}

TEST(JsonReader, TextsThatNlohmannRefusesAreRefused) {
  const std::string original =
      "{\"a\": [1, -2.5e3, true, false, null, \"\\u00e9\\n\xc3\xa9\"], \"b\": {\"c\": {}, \"d\": []}, \"e\": "
      "0.1}";
  const std::string useful = "{}[]\",:0123456789eE.-+ tfna\\u\n\xc3";
  std::mt19937 random(7);
  int num_good = 0;
  for (int i = 0; i < 30'000; ++i) {
    std::string text = original;
    for (size_t edits = 1 + random() % 3; edits-- > 0;) {
      const size_t at = random() % text.size();
      if (random() % 2 == 0)
        text.erase(at, 1 + random() % 3);
      else
        text.insert(at, 1, useful[random() % useful.size()]);
      if (text.empty()) text = " ";
    }
    const std::string error = error_in(text);
    if (error.find("given twice") != std::string::npos) continue;  // nlohmann keeps the last
    EXPECT_EQ(error.empty(), json::accept(text)) << text << "\n" << error;
    if (error.empty()) {
      EXPECT_EQ(parse_json(text), json::parse(text)) << text;
      ++num_good;
    }
  }
  EXPECT_GT(num_good, 1000);
}

TEST(JsonReader, WhatNlohmannAcceptsAndWeRefuse) {
  EXPECT_EQ(error_in(R"({"a": [{"b": 1, "b": 2}]})"), "a[0].b: this key is given twice; expected it once");
  EXPECT_THAT(error_in("[1e-400]"), HasSubstr("too small for a double"));
  EXPECT_THAT(error_in(std::string("[1]\0", 4)), HasSubstr("control character 0x00"));
  EXPECT_THAT(error_in(std::string(65, '[') + std::string(65, ']')), HasSubstr("nested deeper than 64"));
  EXPECT_EQ(error_in(std::string(64, '[') + std::string(64, ']')), "");
}

TEST(JsonReader, WhatOptionsAllow) {
  EXPECT_EQ(error_in(R"(["\u0000"])"), "");
  EXPECT_THAT(error_in(R"(["\u0000"])", {.nul_in_strings = false}), HasSubstr("a NUL character"));
  EXPECT_EQ(error_in("[1, 2, 3]", {.name = "list", .max_values = 3}), "more than 3 values; expected a list");
  EXPECT_TRUE(parse_json_or_discard("{\"a\": ").is_discarded());
  EXPECT_EQ(parse_json_or_discard("[1]"), json({1}));
}

/// What the Python package hjson 3.1.0 makes of the same texts.
TEST(JsonReader, ReadsHjson) {
  const std::vector<std::pair<const char*, json>> cases = {
      {"/* a */ [1, // b\n 2]", {1, 2}},
      {"{a: 1,}", {{"a", 1}}},
      {"a: 1\nb: [2\n3,] # c\n", {{"a", 1}, {"b", {2, 3}}}},
      {"{'a b': 'say \"hi\" \\n it\\'s', \"c\": \"it\\'s\"}", {{"a b", "say \"hi\" \n it's"}, {"c", "it's"}}},
      {"{a: two words # and no comment\n b: -1.5e3 # one\n}",
       {{"a", "two words # and no comment"}, {"b", -1500.0}}},
      {"{\"a\": \"x\" \"b\": 1, c: null, d: false}", {{"a", "x"}, {"b", 1}, {"c", nullptr}, {"d", false}}},
      {"{a: 01\n b: 1 2\n c: truex\n d: 1/2\r\n e: http://x.y/z\n f: it's\n}",
       {{"a", "01"}, {"b", "1 2"}, {"c", "truex"}, {"d", "1/2"}, {"e", "http://x.y/z"}, {"f", "it's"}}},
      {"{a:\n  '''\n  first\n    second\r\n third\n\n  '''\n b: '''x'''}",
       {{"a", "first\n  second\nthird\n"}, {"b", "x"}}},
      {"{a: say \"hi\"\n}", {{"a", "say \"hi\""}}},
      {"{a#b: x, y\n c:\n  1}", {{"a#b", "x, y"}, {"c", 1}}},
  };
  for (const auto& [text, expected] : cases) {
    EXPECT_EQ(parse_json(text, {.hjson = true}), expected) << text;
    EXPECT_NE(error_in(text), "") << text;
  }
  for (const char* text :
       {"# only\n", "a", "a:", "{a: 1} x", "{a: }", "{,a: 1}", "{a: 1,, b: 2}", "{: 1}", "{a b: 1}", "}",
        "{a: [1, 2}", "a: 1\n}", "{a: '''x}", "{a: 1 b: 2}", "{a: True}", "{a: 'x\n'}"})
    EXPECT_NE(error_in(text, {.hjson = true}), "") << text;
}

TEST(JsonReader, ErrorsKnowTheirPlace) {
  try {
    parse_json("{\"a\": 1,\n\"b\": tru}");
    FAIL();
  } catch (const JsonError& error) {
    EXPECT_EQ(error.kind(), JsonError::Kind::kSyntax);
    EXPECT_EQ(error.offset(), 14u);
    EXPECT_THAT(error.what(), HasSubstr("found 'tru'"));
  }
  std::vector<std::pair<std::string, int>> keys;
  parse_json("{\"a\": [\n{\"b\": 1}],\n\n\"c\": 2}", {},
             [&](const std::string& path, int line) { keys.emplace_back(path, line); });
  EXPECT_EQ(keys, (std::vector<std::pair<std::string, int>>{{"a", 1}, {"a[0].b", 2}, {"c", 4}}));
}

TEST(JsonReader, GivesOneValueAfterTheOther) {
  JsonReader in(R"({"skipped": [{"x": [1, 2]}, "]"], "list": ["a", 3, -4, 0.5, true, null], "more": {}} )");
  std::string key;
  ASSERT_EQ(in.next(), JsonKind::kObject);
  in.enter_object();
  ASSERT_TRUE(in.next_key(key));
  EXPECT_EQ(key, "skipped");
  EXPECT_EQ(in.found(), "a list");
  in.skip();
  ASSERT_TRUE(in.next_key(key));
  EXPECT_EQ(key, "list");
  in.enter_array();
  ASSERT_TRUE(in.next_element());
  EXPECT_EQ(in.found(), "'a'");
  EXPECT_EQ(in.string(), "a");
  ASSERT_TRUE(in.next_element());
  EXPECT_EQ(in.unsigned_integer(), 3u);
  ASSERT_TRUE(in.next_element());
  EXPECT_EQ(in.found(), "-4");
  EXPECT_EQ(in.negative_integer(), -4);
  ASSERT_TRUE(in.next_element());
  EXPECT_EQ(in.found(), "'0.5'");
  EXPECT_EQ(in.fraction(), 0.5);
  ASSERT_TRUE(in.next_element());
  EXPECT_TRUE(in.boolean());
  ASSERT_TRUE(in.next_element());
  EXPECT_THROW(in.string(), std::logic_error) << "it is null";
  in.null();
  EXPECT_FALSE(in.next_element());
  ASSERT_TRUE(in.next_key(key));
  in.enter_object();
  EXPECT_FALSE(in.next_key(key));
  EXPECT_FALSE(in.next_key(key));
  in.finish();
}

}  // namespace
}  // namespace tessera

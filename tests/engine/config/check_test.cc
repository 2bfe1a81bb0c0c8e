// Very many or very long mistakes; suggestions. tests/messages has what is said of each mistake.
#include "engine/config/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "core/str.h"
#include "engine/config/document/suggest.h"
#include "engine/config/parse.h"
#include "tests/engine/config/config_testing.h"

namespace tessera {
namespace {

TEST(ConfigCheck, OfVeryManyMistakesTheFirstAreTold) {
  const auto lines_of = [](int num_keys) {
    std::string text = "{";
    for (int i = 0; i < num_keys; ++i) text += str(i ? ",\n" : "\n", "\"kei", i, "\": 1");
    const std::string error = config_error([&] { parse_engine_config(text + "\n}", {}, "c.json"); });
    std::vector<std::string> lines;
    std::istringstream stream(error);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
  };
  EXPECT_EQ(lines_of(20).size(), 20u);
  EXPECT_EQ(lines_of(21).size(), 21u);
  EXPECT_EQ(lines_of(21).back(), "… and 1 more errors");
  const auto lines = lines_of(99'000);  // in hours, if the time grew with the square
  ASSERT_EQ(lines.size(), 21u);
  EXPECT_EQ(lines[20], "… and at least 180 more errors");
  EXPECT_THAT(lines_of(100'001).front(), ::testing::HasSubstr("more than 100000 values"));
}

TEST(ConfigCheck, LongValuesAndManyMistakesAreToldInShort) {
  const std::string word(3'000'000, 'k');
  std::string keys, groups;
  for (int i = 0; i < 45'000; ++i) {
    keys += str(", \"k", i, "\": 1");
    groups += str(i ? ", " : "", R"({"macht": "x"})");
  }
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"\"" + word + "\": 1", "bytes more"},
      {R"("optimizer": {"type": ")" + word + "\"}", "kkk..."},
      {R"("zero_optimization": {"stage": 9)" + keys + "}", "more errors"},
      {R"("optimizer": {"param_groups": [)" + groups + "]}", "param_groups[0].macht: unknown key"}};
  for (const auto& [text, part] : cases) {
    const std::string error = error_for(text);
    EXPECT_THAT(error, ::testing::HasSubstr(part)) << error.substr(0, 10'000);
    EXPECT_LT(error.size(), 10'000u);
    EXPECT_LE(std::count(error.begin(), error.end(), '\n'), 20);
  }
}

TEST(ConfigCheck, EditDistance) {
  EXPECT_EQ(config::edit_distance("stage", "stage"), 0);
  EXPECT_EQ(config::edit_distance("stgae", "stage"), 1);  // a swap
  EXPECT_EQ(config::edit_distance("Stage", "stage"), 0);
  EXPECT_EQ(config::edit_distance("", "abc"), 3);
  EXPECT_EQ(config::edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(config::nearest_name("lr_rate", {"momentum", "betas"}), "");
  EXPECT_EQ(config::nearest_name("micro_batch", {"seed", "train_micro_batch_size_per_gpu"}),
            "train_micro_batch_size_per_gpu");
  EXPECT_EQ(config::nearest_name(std::string(100'000, 'a'), {"seed"}), "");
}

}  // namespace
}  // namespace tessera

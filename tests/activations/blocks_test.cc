#include "activations/blocks.h"

#include <gtest/gtest.h>

namespace tessera::activations {
namespace {

std::vector<NamedShape> parameters(const std::vector<std::string>& names) {
  std::vector<NamedShape> all;
  for (const std::string& name : names) all.push_back({name, "fp32 4"});
  return all;
}

TEST(Blocks, ElementsOfAListThatAreAlike) {
  EXPECT_EQ(blocks_of(parameters({"tokens.weight", "blocks.0.norm.weight", "blocks.0.up.weight",
                                  "blocks.1.norm.weight", "blocks.1.up.weight", "head.weight"})),
            (std::vector<int>{-1, 0, 0, 1, 1, -1}));
}

TEST(Blocks, TheOutermostListCounts) {
  EXPECT_EQ(blocks_of(parameters({"layers.0.experts.0.w", "layers.0.experts.1.w", "layers.1.experts.0.w",
                                  "layers.1.experts.1.w"})),
            (std::vector<int>{0, 0, 1, 1}));
}

TEST(Blocks, OnlyWhereTwoAreAlike) {
  std::vector<NamedShape> all = parameters({"stages.0.w", "stages.1.w", "stages.2.w"});
  for (size_t i = 0; i < all.size(); ++i) all[i].shape = std::to_string(i);
  EXPECT_EQ(blocks_of(all), (std::vector<int>{-1, -1, -1}));
  all[2].shape = all[0].shape;
  EXPECT_EQ(blocks_of(all), (std::vector<int>{0, 1, 2})) << "one that differs is a block beside them";
}

TEST(Blocks, TwoListsAndAModelThatIsOne) {
  EXPECT_EQ(blocks_of(parameters({"encoder.0.w", "encoder.1.w", "decoder.0.w", "decoder.1.w"})),
            (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(blocks_of(parameters({"0.weight", "2.weight"})), (std::vector<int>{0, 1}));
  EXPECT_EQ(blocks_of(parameters({"weight", "a1.weight"})), (std::vector<int>{-1, -1}));
}

TEST(Blocks, ByName) {
  const auto is_block = [](const std::string& module) { return module == "a" || module == "b.1"; };
  EXPECT_EQ(blocks_of(parameters({"a.w", "a.0.w", "b.0.w", "b.1.w", "b.w"}), is_block),
            (std::vector<int>{0, 0, -1, 1, -1}));
}

}  // namespace
}  // namespace tessera::activations

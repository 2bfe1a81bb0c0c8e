#include "checkpoint/foreign/optimizer_names.h"

#include <gtest/gtest.h>

namespace tessera::checkpoint {
namespace {

using Members = std::vector<std::vector<size_t>>;

const std::vector<int64_t> kMatrix = {8, 8}, kWide = {8, 32}, kVector = {8};

/// Two layers of a matrix, a bias and a norm.
const std::vector<NamedShape> kModel = {{"embed.weight", kWide},         {"layers.0.fc.weight", kMatrix},
                                        {"layers.0.fc.bias", kVector},   {"layers.0.ln.weight", kVector},
                                        {"layers.1.fc.weight", kMatrix}, {"layers.1.fc.bias", kVector},
                                        {"layers.1.ln.weight", kVector}};

TEST(OptimizerNames, OneGroupOfAllHasTheModelsOrder) {
  GroupShapes all;
  for (const NamedShape& one : kModel) all.push_back(one.shape);
  EXPECT_EQ(name_groups(kModel, {all}, true, false).members, (Members{{0, 1, 2, 3, 4, 5, 6}}));
  all[1].reset();  // without a state; there is one place for it all the same
  EXPECT_EQ(name_groups(kModel, {all}, true, false).members, (Members{{0, 1, 2, 3, 4, 5, 6}}));
}

TEST(OptimizerNames, MatricesAndVectorsAreTwoGroups) {
  const GroupShapes matrices = {kWide, kMatrix, kMatrix}, vectors = {kVector, kVector, kVector, kVector};
  EXPECT_EQ(name_groups(kModel, {matrices, vectors}, true, false).members,
            (Members{{0, 1, 4}, {2, 3, 5, 6}}));
  EXPECT_EQ(name_groups(kModel, {vectors, matrices}, true, false).members,
            (Members{{2, 3, 5, 6}, {0, 1, 4}}));
}

TEST(OptimizerNames, GroupsThatSeveralWaysFitHaveNoNames) {
  // The first layer's vectors in one group, the second's in the other: or biases and norms.
  const std::vector<GroupShapes> groups = {{kWide, kMatrix, kVector, kVector}, {kMatrix, kVector, kVector}};
  const NamedGroups found = name_groups(kModel, groups, true, false);
  EXPECT_TRUE(found.members.empty());
  EXPECT_EQ(found.why_not, "several orders of the model's parameters have these shapes");
}

TEST(OptimizerNames, TheTrainersRuleSaysWhichMatrixDecays) {
  const std::vector<NamedShape> model = {
      {"a.weight", kMatrix}, {"norm.weight", kMatrix}, {"b.weight", kMatrix}, {"b.bias", kVector}};
  const std::vector<GroupShapes> groups = {{kMatrix, kMatrix}, {kMatrix, kVector}};
  EXPECT_TRUE(name_groups(model, groups, true, false).members.empty());
  EXPECT_EQ(name_groups(model, groups, true, true).members, (Members{{0, 2}, {1, 3}}));
}

TEST(OptimizerNames, FrozenParametersAreSkippedWhereOneWayIsLeft) {
  EXPECT_EQ(name_groups(kModel, {{kWide, kMatrix, kMatrix}}, true, false).members, (Members{{0, 1, 4}}));
  EXPECT_TRUE(name_groups(kModel, {{kMatrix}}, true, false).members.empty());  // of which layer?
  std::vector<NamedShape> model = kModel;
  model.push_back({"head.weight", {3, 8}});
  EXPECT_EQ(name_groups(model, {{std::vector<int64_t>{3, 8}}}, true, false).members, (Members{{7}}));
}

TEST(OptimizerNames, OtherShapesAreSaid) {
  const NamedGroups more = name_groups({{"a", kVector}}, {{kVector, kVector}}, true, false);
  EXPECT_EQ(more.why_not, "the optimizer has 2 parameters, the model 1");
  const NamedGroups other = name_groups({{"a", kVector}, {"b", kWide}}, {{kVector, kMatrix}}, true, false);
  EXPECT_EQ(other.why_not, "its shapes are not those of the model in order (no place for b [8, 32])");
}

TEST(OptimizerNames, WithoutAnOrderOnlyAShapeOfItsOwnIsAName) {
  const std::vector<NamedShape> model = {{"b", kVector}, {"w", kMatrix}, {"e", kWide}};
  EXPECT_EQ(name_groups(model, {{kWide, kMatrix}, {kVector}}, false, false).members, (Members{{2, 1}, {0}}));
  EXPECT_EQ(name_groups(kModel, {{kWide, kMatrix, kVector}}, false, false).why_not,
            "several parameters have the shape [8, 8]");
  EXPECT_EQ(name_groups(model, {{kWide, std::nullopt}}, false, false).why_not,
            "a parameter has no state that says its shape");
}

TEST(OptimizerNames, ManyParametersTakeNoLong) {
  std::vector<NamedShape> model;
  std::vector<GroupShapes> groups(2);
  for (int i = 0; i < 2000; ++i) {
    model.push_back({std::to_string(i), i % 2 == 0 ? kMatrix : kVector});
    groups[static_cast<size_t>(i % 2)].push_back(model.back().shape);
  }
  EXPECT_EQ(name_groups(model, groups, true, false).members[1][999], 1999U);
  for (auto& group : groups)
    for (auto& shape : group) shape.reset();
  EXPECT_TRUE(name_groups(model, groups, true, false).members.empty());
}

}  // namespace
}  // namespace tessera::checkpoint

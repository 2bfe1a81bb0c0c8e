// How parameters are packed into units and units cut into shards.
#include "zero/plan/layout.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <stdexcept>

namespace tessera::zero {
namespace {

ParameterSpec spec(const std::string& name, std::vector<int64_t> shape, DType dtype = DType::kFloat32,
                   bool trainable = true) {
  return {.name = name,
          .shape = std::move(shape),
          .dtype = dtype,
          .trainable = trainable,
          .group = 0,
          .aliases = {}};
}

int64_t alignment(DType dtype) { return 64 / size_bytes(dtype); }

TEST(Layout, PacksInRegistrationOrderUntilAUnitIsFull) {
  const Layout layout({spec("a.weight", {32}), spec("b.weight", {16}), spec("c.weight", {32})},
                      {.world_size = 1, .unit_numel = 48});
  ASSERT_EQ(layout.num_units(), 2);
  EXPECT_EQ(layout.units()[0].parameters, (std::vector<int>{0, 1}));
  EXPECT_EQ(layout.units()[1].parameters, (std::vector<int>{2}));
  EXPECT_EQ(layout.slice(1).offset, 32);
  EXPECT_EQ(layout.slice(2).unit, 1);
  EXPECT_EQ(layout.slice(2).offset, 0);
}

TEST(Layout, ParametersStartAt64BytesAndUnitsDivideByTheWorld) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (int world : {1, 2, 3, 5, 8}) {
      const Layout layout({spec("a", {3}, dtype), spec("b", {7, 5}, dtype), spec("c", {1}, dtype)},
                          {.world_size = world, .unit_numel = 1'000});
      ASSERT_EQ(layout.num_units(), 1);
      EXPECT_EQ(layout.slice(1).offset * size_bytes(dtype), 64);
      for (int i = 0; i < 3; ++i) EXPECT_EQ(layout.slice(i).offset * size_bytes(dtype) % 64, 0);
      EXPECT_EQ(layout.units()[0].numel * size_bytes(dtype) % (world * 64), 0);
      EXPECT_EQ(layout.shard_numel(0) * world, layout.units()[0].numel);
      const int64_t used = layout.slice(2).offset + alignment(dtype);
      EXPECT_LT(layout.units()[0].numel - used, world * alignment(dtype)) << "more padding than needed";
    }
  }
}

TEST(Layout, LeafModulesStayWhole) {
  // fc2's weight would fit in the first unit, its bias would not: both go to the next one.
  const Layout layout(
      {spec("fc1.weight", {32}), spec("fc1.bias", {16}), spec("fc2.weight", {32}), spec("fc2.bias", {16})},
      {.world_size = 1, .unit_numel = 80});
  ASSERT_EQ(layout.num_units(), 2);
  EXPECT_EQ(layout.units()[0].parameters, (std::vector<int>{0, 1}));
  EXPECT_EQ(layout.units()[1].parameters, (std::vector<int>{2, 3}));
}

TEST(Layout, AParameterLargerThanAUnitStandsAlone) {
  const Layout layout(
      {spec("a.weight", {16}), spec("big.weight", {1'000}), spec("big.bias", {16}), spec("c.weight", {16})},
      {.world_size = 1, .unit_numel = 64});
  ASSERT_EQ(layout.num_units(), 3);
  EXPECT_EQ(layout.units()[1].parameters, (std::vector<int>{1}));
  EXPECT_EQ(layout.units()[2].parameters, (std::vector<int>{2, 3}));
}

TEST(Layout, FrozenOnesAndOtherTypesHaveUnitsOfTheirOwn) {
  const Layout layout({spec("a", {4}), spec("b", {4}, DType::kFloat32, /*trainable=*/false),
                       spec("c", {4}, DType::kBFloat16), spec("d", {4})},
                      {.world_size = 2, .unit_numel = 1'000});
  ASSERT_EQ(layout.num_units(), 3);
  for (const UnitSpec& unit : layout.units())
    for (int parameter : unit.parameters) {
      EXPECT_EQ(layout.parameters()[parameter].dtype, unit.dtype);
      EXPECT_EQ(layout.parameters()[parameter].trainable, unit.trainable);
    }
  EXPECT_EQ(layout.slice(0).unit, layout.slice(3).unit);
}

TEST(Layout, ParametersWithoutElements) {
  const Layout layout({spec("a", {0, 5}), spec("b", {3}), spec("c", {0})},
                      {.world_size = 3, .unit_numel = 100});
  ASSERT_EQ(layout.num_units(), 1);
  EXPECT_EQ(layout.slice(0).numel, 0);
  EXPECT_EQ(layout.slice(1).numel, 3);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(layout.shard_part(0, rank).numel(), 0);
  const Layout nothing({spec("a", {0})}, {.world_size = 3, .unit_numel = 100});
  EXPECT_EQ(nothing.units()[0].numel, 0);
  EXPECT_EQ(Layout({}, {}).num_units(), 0);
  EXPECT_EQ(spec("scalar", {}).numel(), 1);
}

TEST(Layout, FindsByNameAndAlias) {
  ParameterSpec tied = spec("wte.weight", {4, 4});
  tied.aliases = {"head.weight"};
  const Layout layout({spec("a", {1}), tied}, {});
  EXPECT_EQ(layout.find("wte.weight"), 1);
  EXPECT_EQ(layout.find("head.weight"), 1);
  EXPECT_EQ(layout.find("head"), -1);
  EXPECT_THROW(Layout({tied, spec("head.weight", {1})}, {}), std::logic_error);
  EXPECT_THROW(Layout({spec("a", {1}), spec("a", {1})}, {}), std::logic_error);
  EXPECT_THROW(Layout({spec("a", {-1})}, {}), std::logic_error);
}

TEST(Layout, DescribesItsUnits) {
  const Layout layout(
      {spec("a.weight", {4}), spec("a.bias", {4}), spec("b.weight", {4}), spec("big", {1'000})},
      {.world_size = 1, .unit_numel = 64});
  EXPECT_EQ(layout.describe(0), "unit 0 (a.weight … b.weight)");
  EXPECT_EQ(layout.describe(1), "unit 1 (big)");
  const Layout two({spec("a.weight", {4}), spec("a.bias", {4})}, {});
  EXPECT_EQ(two.describe(0), "unit 0 (a.weight, a.bias)");
}

TEST(Layout, DigestChangesWithAnyDetail) {
  const auto digest = [](const std::function<void(std::vector<ParameterSpec>&, LayoutOptions&)>& change) {
    std::vector<ParameterSpec> specs{spec("a.weight", {4, 6}), spec("b.weight", {20})};
    LayoutOptions options{.world_size = 2, .unit_numel = 1'000};
    change(specs, options);
    return Layout(specs, options).digest();
  };
  const uint64_t original = digest([](auto&, auto&) {});
  EXPECT_EQ(digest([](auto&, auto&) {}), original);
  EXPECT_NE(digest([](auto& specs, auto&) { specs[0].name = "a.weighs"; }), original);
  EXPECT_NE(digest([](auto& specs, auto&) { specs[0].shape = {6, 4}; }), original);
  EXPECT_NE(digest([](auto& specs, auto&) {
              for (auto& s : specs) s.dtype = DType::kFloat64;
            }),
            original);
  EXPECT_NE(digest([](auto& specs, auto&) { specs[1].trainable = false; }), original);
  EXPECT_NE(digest([](auto& specs, auto&) { specs[1].group = 1; }), original);
  EXPECT_NE(digest([](auto& specs, auto&) { specs[1].aliases = {"c"}; }), original);
  EXPECT_NE(digest([](auto& specs, auto&) { std::swap(specs[0], specs[1]); }), original);
  EXPECT_NE(digest([](auto&, auto& options) { options.world_size = 1; }), original);
  EXPECT_NE(digest([](auto&, auto& options) { options.unit_numel = 20; }), original);
}

TEST(Layout, RangesOverlap) {
  EXPECT_EQ(intersect({0, 10}, {5, 20}), (Range{5, 10}));
  EXPECT_EQ(intersect({0, 10}, {10, 20}).numel(), 0);
  EXPECT_EQ(intersect({15, 20}, {0, 10}).numel(), 0);
}

std::vector<ParameterSpec> random_specs(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  std::vector<ParameterSpec> specs;
  int module = 0;
  for (int i = 0, num = 1 + below(12); i < num; ++i) {
    if (below(2) == 0) ++module;
    const std::vector<int64_t> shape =
        below(8) == 0 ? std::vector<int64_t>{0, 3} : std::vector<int64_t>{1 + below(9), 1 + below(40)};
    specs.push_back(spec("m" + std::to_string(module) + ".p" + std::to_string(i), shape,
                         below(3) == 0 ? DType::kBFloat16 : DType::kFloat32, below(4) != 0));
  }
  return specs;
}

/// Every element of every parameter has one place and one owner.
void expect_partition(const Layout& layout) {
  std::vector<bool> placed(layout.parameters().size(), false);
  for (int unit = 0; unit < layout.num_units(); ++unit) {
    int64_t end = 0;
    for (int parameter : layout.units()[unit].parameters) {
      EXPECT_FALSE(placed[parameter]);
      placed[parameter] = true;
      EXPECT_EQ(layout.slice(parameter).unit, unit);
      EXPECT_GE(layout.slice(parameter).offset, end);
      end = layout.slice(parameter).range().end;
    }
    EXPECT_LE(end, layout.units()[unit].numel);
  }
  for (int parameter = 0; parameter < static_cast<int>(placed.size()); ++parameter) {
    EXPECT_TRUE(placed[parameter]);
    EXPECT_EQ(layout.slice(parameter).numel, layout.parameters()[parameter].numel());
    int64_t next = layout.slice(parameter).offset;
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      const Range owned = layout.shard_part(parameter, rank);
      if (owned.numel() == 0) continue;
      EXPECT_EQ(owned.begin, next);
      EXPECT_EQ(intersect(owned, layout.shard(layout.slice(parameter).unit, rank)), owned);
      next = owned.end;
    }
    EXPECT_EQ(next, layout.slice(parameter).range().end);
  }
}

TEST(Layout, OwnedRangesPartitionEveryParameter) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 300; ++trial) {
    SCOPED_TRACE(trial);
    const std::vector<ParameterSpec> specs = random_specs(random);
    for (int world = 1; world <= 9; ++world) {
      const Layout layout(specs,
                          {.world_size = world, .unit_numel = 1 + static_cast<int64_t>(random() % 700)});
      expect_partition(layout);
    }
  }
}

}  // namespace
}  // namespace tessera::zero

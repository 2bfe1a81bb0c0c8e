// Loading into another world, unit size or packing: which ranges are read, that their bits
// arrive, and no more bytes than needed.
#include "checkpoint/read/reshard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "core/str.h"
#include "tests/checkpoint/checkpoint_testing.h"

namespace tessera::checkpoint::testing {
namespace {

using ::testing::ElementsAre;
using zero::Layout;
using zero::ParameterSpec;
using zero::Range;

ParameterSpec spec(const std::string& name, std::vector<int64_t> shape, DType dtype = DType::kFloat32,
                   bool trainable = true) {
  return {.name = name,
          .shape = std::move(shape),
          .dtype = dtype,
          .trainable = trainable,
          .group = 0,
          .aliases = {}};
}

std::vector<ParameterSpec> random_specs(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  std::vector<ParameterSpec> specs;
  for (int i = 0, num = 1 + below(14); i < num; ++i) {
    const std::vector<int64_t> shape = below(10) == 0   ? std::vector<int64_t>{0, 3}
                                       : below(10) == 0 ? std::vector<int64_t>{}
                                                        : std::vector<int64_t>{1 + below(9), 1 + below(40)};
    const DType dtype = below(3) == 0 ? DType::kBFloat16 : DType::kFloat32;
    specs.push_back(spec(str("m", i / 2, ".p", i), shape, dtype, below(4) != 0));
  }
  return specs;
}

/// Every wanted element of every matched parameter comes from where that element was saved, and is read once.
void expect_plan_is_right(const Layout& old_layout, const Layout& layout, const std::vector<Range>& wanted) {
  const SavedLayout saved = saved_layout(old_layout);
  const Comparison comparison = compare(saved, layout);
  ASSERT_TRUE(comparison.exact()) << comparison.describe();
  // (file, saved unit, element) of each current element.
  std::vector<std::vector<std::tuple<int, int, int64_t>>> source(layout.num_units());
  for (int unit = 0; unit < layout.num_units(); ++unit)
    source[unit].assign(layout.units()[unit].numel, {-1, -1, -1});
  for (const Piece& piece : plan_reads(saved, layout, comparison.matches, wanted)) {
    const int saved_unit = saved.parameters[piece.parameter].unit;
    const SavedPlace place = saved.place(piece.parameter, piece.first);
    ASSERT_GT(piece.numel, 0);
    ASSERT_LE(piece.numel, place.numel);
    ASSERT_EQ(piece.file, place.rank);
    ASSERT_GE(place.begin, 0);
    ASSERT_LE(place.begin + piece.numel, saved.shard_numel(saved_unit));
    EXPECT_EQ(intersect({piece.begin, piece.begin + piece.numel}, wanted[piece.unit]).numel(), piece.numel);
    for (int64_t i = 0; i < piece.numel; ++i) {
      auto& one = source[piece.unit].at(piece.begin + i);
      ASSERT_EQ(std::get<0>(one), -1) << "read twice";
      one = {piece.file, saved_unit, place.begin + i};
    }
  }
  for (int index = 0; index < static_cast<int>(layout.parameters().size()); ++index) {
    const zero::UnitSlice &slice = layout.slice(index),
                          &old_slice = old_layout.slice(old_layout.find(layout.parameters()[index].name));
    const Range range = intersect(slice.range(), wanted[slice.unit]);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t element = i - slice.offset + old_slice.offset, shard = saved.shard_numel(old_slice.unit);
      ASSERT_EQ(source[slice.unit][i],
                std::tuple(static_cast<int>(element / shard), old_slice.unit, element % shard));
    }
  }
}

TEST(Reshard, AnyLayoutIntoAnyOther) {
  std::mt19937 random(23);
  for (int trial = 0; trial < 60; ++trial) {
    SCOPED_TRACE(trial);
    std::vector<ParameterSpec> specs = random_specs(random), shuffled = specs;
    if (trial % 3 == 0) std::shuffle(shuffled.begin(), shuffled.end(), random);
    for (int old_world : {1, 2, 3, 4, 8})
      for (int world : {1, 2, 3, 4, 8}) {
        const auto unit_numel = [&] { return 1 + static_cast<int64_t>(random() % 700); };
        const Layout old_layout(specs, {.world_size = old_world, .unit_numel = unit_numel()});
        const Layout layout(shuffled, {.world_size = world, .unit_numel = unit_numel()});
        expect_plan_is_right(old_layout, layout, wanted_units(layout));
        for (int rank = 0; rank < world; ++rank)
          expect_plan_is_right(old_layout, layout, wanted_shards(layout, rank));
        if (HasFatalFailure()) return;
      }
  }
}

TEST(Reshard, TheSameLayoutIsReadFromOnesOwnFileInItsOrder) {
  const SampleModel model = sample_model(4, 1);
  const SavedLayout saved = saved_layout(model.layout());
  for (int rank = 0; rank < 4; ++rank) {
    std::pair<int, int64_t> before{-1, -1};
    for (const Piece& piece : plan_reads(saved, model.layout(), compare(saved, model.layout()).matches,
                                         wanted_shards(model.layout(), rank))) {
      EXPECT_EQ(piece.file, rank);
      const std::pair place{saved.parameters[piece.parameter].unit,
                            saved.place(piece.parameter, piece.first).begin};
      EXPECT_GT(place, before);
      before = place;
    }
  }
}

TEST(Reshard, ABlockReadBeforeIsNotReadAgain) {
  const MemoryFolder folder;
  const SampleModel model = sample_model(1, 4);  // one block
  save_all(model, folder.path(), "a");
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  EXPECT_EQ(model.difference(checkpoint), "");
  EXPECT_EQ(checkpoint.elements().bytes_read(), checkpoint.manifest().rank_file(0).bytes);
}

TEST(Compare, ListsWhatDoesNotFit) {
  const SavedLayout saved = saved_layout(Layout(
      {spec("a", {2, 3}), spec("b", {4}), spec("c", {5}), spec("f", {6}, DType::kFloat32, false)}, {}));
  const Layout current({spec("a", {3, 2}), spec("b", {4}), spec("d", {5}), spec("f", {6})}, {});
  const Comparison found = compare(saved, current);
  EXPECT_THAT(found.missing, ElementsAre("d"));
  EXPECT_THAT(found.extra, ElementsAre("c"));
  EXPECT_THAT(found.reshaped, ElementsAre("a: [2, 3] in the checkpoint, [3, 2] in the model"));
  EXPECT_THAT(found.unfrozen, ElementsAre("f"));
  EXPECT_THAT(found.matches, ElementsAre(Match{1, 1}, Match{3, 3}));
  EXPECT_FALSE(found.exact());
  EXPECT_EQ(found.describe(),
            "1 of the model's parameters are not in the checkpoint: d; 1 of the checkpoint's parameters are "
            "not in the model: c; "
            "1 have another shape: a: [2, 3] in the checkpoint, [3, 2] in the model; "
            "1 are trainable now but were saved frozen, without optimizer state: f");
  const Layout same({spec("a", {2, 3}), spec("b", {4}, DType::kBFloat16),
                     spec("c", {5}, DType::kFloat32, false), spec("f", {6}, DType::kBFloat16, false)},
                    {});
  EXPECT_TRUE(compare(saved, same).exact()) << "other dtypes and newly frozen parameters are no obstacle";
  EXPECT_EQ(compare(saved, same).describe(), "");
}

TEST(Compare, ManyNamesAreCut) {
  std::vector<ParameterSpec> specs;
  for (int i = 0; i < 9; ++i) specs.push_back(spec(str("p", i), {1}));
  EXPECT_EQ(compare(saved_layout(Layout({}, {})), Layout(specs, {})).describe(),
            "9 of the model's parameters are not in the checkpoint: p0, p1, p2, p3, p4 and 4 more");
}

TEST(Compare, TiedParametersAreFoundByAnyName) {
  ParameterSpec tied = spec("wte", {4});
  tied.aliases = {"head"};
  ParameterSpec other_name = spec("head", {4});
  other_name.aliases = {"decoder"};
  const SavedLayout saved = saved_layout(Layout({tied}, {}));
  EXPECT_THAT(compare(saved, Layout({other_name}, {})).matches, ElementsAre(Match{0, 0}));
  ParameterSpec by_alias = spec("embedding", {4});
  by_alias.aliases = {"wte"};
  EXPECT_THAT(compare(saved, Layout({by_alias}, {})).matches, ElementsAre(Match{0, 0}));
  // Tied when saved, two parameters now: one serves both.
  const Comparison untied = compare(saved, Layout({spec("wte", {4}), spec("head", {4})}, {}));
  EXPECT_THAT(untied.matches, ElementsAre(Match{0, 0}, Match{0, 1}));
  EXPECT_TRUE(untied.exact());
  // Two when saved, tied now: one of them would be lost, so it is named.
  const Comparison tied_now =
      compare(saved_layout(Layout({spec("wte", {4}), spec("head", {4})}, {})), Layout({tied}, {}));
  EXPECT_THAT(tied_now.extra, ElementsAre("head"));
}

}  // namespace
}  // namespace tessera::checkpoint::testing

// What initialize() with a function that makes the model takes: bytes, and who draws random numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "comm/init/self.h"
#include "core/memory/process_memory.h"
#include "core/str.h"
#include "examples/language_model/model.h"
#include "tests/support/backend.h"
#include "tests/support/live_bytes.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

struct Sizes {
  int64_t model = 0, shards = 0, largest_unit = 0, vectors = 0;  // bytes; vectors: biases and norms
};

Sizes sizes_of(const zero::Layout& layout) {
  Sizes sizes;
  for (const zero::UnitSpec& unit : layout.units()) {
    sizes.model += 4 * unit.numel;
    sizes.shards += 4 * unit.numel / layout.world_size();
    sizes.largest_unit = std::max(sizes.largest_unit, 4 * unit.numel);
  }
  for (const zero::ParameterSpec& parameter : layout.parameters())
    if (parameter.shape.size() == 1) sizes.vectors += 4 * parameter.numel();
  return sizes;
}

EngineConfig stage_3(int64_t unit_numel) {
  EngineConfig config;
  config.train_micro_batch_size_per_gpu = 1;
  config.optimizer.options = SGDOptions{.lr = 0.1};
  config.zero.stage = 3;
  config.zero.unit_numel = unit_numel;
  return config;
}

void expect_two_units(int64_t peak, const Sizes& sizes) {
  constexpr int64_t kSmallThings = 256 << 10;  // the generator's states, tensors of one element
  EXPECT_LE(peak, sizes.shards + 2 * sizes.largest_unit + sizes.vectors + kSmallThings);
}

void expect_drawn_by_rank_0_alone(const zero::MakingCounts& counts, int rank) {
  EXPECT_FALSE(counts.whole);
  EXPECT_GT(counts.num_recorded, 0);
  EXPECT_EQ(counts.num_drawn > 0, rank == 0);
  EXPECT_EQ(counts.num_run > 0, rank == 0);
}

/// A model alone in units: it is frozen but for one vector, so that gradients take nothing.
class MakingMemory : public ::testing::TestWithParam<bool> {};  // whether values are loaded next
INSTANTIATE_TEST_SUITE_P(Values, MakingMemory, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Loaded" : "Computed"; });

TEST_P(MakingMemory, IsTheShardsAndTwoUnits) {
  on_ranks(4, [&](comm::CommunicatorPtr comm) {
    LiveBytes live;
    zero::DeferredModel deferred;
    std::shared_ptr<GptImpl> model;
    deferred.make([&] {
      model = std::make_shared<GptImpl>(GptOptions{.dim = 256, .layers = 8, .vocabulary = 2048});
      for (const at::Tensor& parameter : model->parameters()) parameter.set_requires_grad(false);
      model->norm->weight.set_requires_grad(true);
    });
    const int64_t recorded = live.peak();
    zero::ShardedModelOptions options;
    options.sharding = zero::sharding_of(3);
    options.unit_numel = 600'000;
    options.optimizer.kind = kernels::OptimizerKind::kSGD;
    if (GetParam()) options.loaded_next = [](const std::string&) { return true; };
    const zero::ShardedModel sharded(zero::view_of(*model, &deferred), comm, options);
    const Sizes sizes = sizes_of(sharded.layout());
    ASSERT_GT(sizes.model, 12 * sizes.largest_unit);
    EXPECT_LE(recorded, sizes.vectors + (256 << 10));
    // Ranks that share memory have one copy of the parameters together.
    const int sharing = comm->host_rank().num_ranks, owners = sharing > 1 ? sharing : comm->size();
    EXPECT_EQ(sharded.measured_bytes().parameters * owners, sizes.shards * comm->size());
    expect_two_units(live.peak(), sizes);
    if (!GetParam()) return expect_drawn_by_rank_0_alone(deferred.counts(), comm->rank());
    EXPECT_EQ(deferred.counts().num_drawn, 0);
    EXPECT_EQ(deferred.counts().num_run, 0);
  });
}

// Layers as wide as GPT-2 XL's, 1.5 GB of them in fp32.
TEST(MakingMemoryOfALargeModel, OneRankOf64TakesAPart) {
  TESSERA_ON_ONE_BACKEND();
  for (const int rank : {63, 0}) {
    SCOPED_TRACE(str("rank ", rank));
    LiveBytes live;
    zero::MakingCounts counts;
    std::unique_ptr<Engine> engine;
    const double before = own_bytes();
    const double peak = peak_own_bytes(
        [&] {
          engine = initialize(
              [] {
                return Gpt(
                    GptOptions{.dim = 1600, .layers = 12, .heads = 25, .vocabulary = 8192, .sequence = 1024});
              },
              stage_3(4'000'000),
              std::make_shared<comm::SelfCommunicator>(comm::SimulatedGroup{.rank = rank, .size = 64}), {},
              &counts);
        },
        std::chrono::milliseconds(50));
    const Sizes sizes = sizes_of(engine->sharded_model().layout());
    EXPECT_GT(sizes.model, 1'450'000'000);
    EXPECT_LT(live.peak(), 300'000'000);
    EXPECT_LT(peak - before, 700'000'000);
    expect_drawn_by_rank_0_alone(counts, rank);
  }
}

}  // namespace
}  // namespace tessera::testing

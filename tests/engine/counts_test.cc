// How many collectives a step takes, counted by a communicator around the real one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "core/str.h"
#include "tests/support/losses.h"
#include "tests/support/watched_communicator.h"

namespace tessera::testing {
namespace {

struct StepCounts {
  std::vector<std::vector<CollectiveCounts>>
      micro_steps;  // [step][micro-step]: the group that reduces, backward() alone
  std::vector<CollectiveCounts> forward_gathers;  // [step]: the group that gathers, all forwards
  std::vector<CollectiveCounts> gathers;          // [step]: the same group, the whole step
  std::vector<CollectiveCounts> steps;            // [step]: the main group, step() alone
  std::vector<int> exchanges;                     // [step]: over the store, all groups
  std::vector<std::vector<int>> unit_gathers;     // [step]: by unit, last forward and backward
  std::vector<int> agreed_gathers;                // [step]
  int num_units = 0;
  int num_trainable_units = 0;
  std::vector<std::string> units;
  std::vector<int> embedding_units;  // hold nothing but embedding tables
};

CollectiveCounts operator-(const CollectiveCounts& a, const CollectiveCounts& b) {
  return {a.all_gathers - b.all_gathers, a.reduce_scatters - b.reduce_scatters,
          a.all_reduces - b.all_reduces, a.broadcasts - b.broadcasts,
          a.barriers - b.barriers,       a.bytes - b.bytes};
}

int64_t total(const CollectiveCounts& counts) {
  return counts.all_gathers + counts.reduce_scatters + counts.all_reduces + counts.broadcasts +
         counts.barriers;
}

void describe_units(const zero::Layout& layout, const std::vector<std::string>& tables, StepCounts& counts) {
  counts.num_units = layout.num_units();
  for (int unit = 0; unit < layout.num_units(); ++unit) {
    if (layout.units()[unit].trainable) ++counts.num_trainable_units;
    counts.units.push_back(layout.describe(unit));
    const std::vector<int>& members = layout.units()[unit].parameters;
    if (std::all_of(members.begin(), members.end(), [&](int parameter) {
          return std::count(tables.begin(), tables.end(), layout.parameters()[parameter].name) > 0;
        }))
      counts.embedding_units.push_back(unit);
  }
}

/// Counts of the last rank.
template <class Holder>
StepCounts count(const Case& c, const LossOf<typename Holder::Impl>& loss_of,
                 const std::vector<std::string>& tables = {}) {
  StepCounts counts;
  on_ranks(c.world, [&](comm::CommunicatorPtr inner) {
    auto comm = std::make_shared<WatchedCommunicator>(inner);
    Holder model;
    fill_parameters(*model, 1);
    auto engine = initialize(model, engine_config(c), comm);
    const WatchedCommunicator& gather = comm->named("gather");
    const WatchedCommunicator& reduce = comm->named("reduce");
    StepCounts mine;
    describe_units(engine->sharded_model().layout(), tables, mine);
    for (int step = 0; step < c.steps; ++step) {
      const CollectiveCounts gather_before = gather.counts();
      const int exchanges_before = comm->num_exchanges();
      CollectiveCounts forward;
      mine.micro_steps.emplace_back();
      for (int micro = 0; micro < c.accumulation; ++micro) {
        const CollectiveCounts before_forward = gather.counts();
        const at::Tensor loss = loss_of(*model, step, first_sample(c, micro, comm->rank()), c.micro_batch);
        const CollectiveCounts more = gather.counts() - before_forward;
        forward.all_gathers += more.all_gathers;
        forward.bytes += more.bytes;
        const CollectiveCounts before = reduce.counts();
        engine->backward(loss);
        mine.micro_steps.back().push_back(reduce.counts() - before);
        const CollectiveCounts main_before = comm->counts();
        engine->step();
        if (micro == c.accumulation - 1) mine.steps.push_back(comm->counts() - main_before);
      }
      mine.forward_gathers.push_back(forward);
      mine.gathers.push_back(gather.counts() - gather_before);
      mine.exchanges.push_back(comm->num_exchanges() - exchanges_before);
      mine.unit_gathers.push_back(engine->sharded_model().residency().previous_counts().gathers);
      mine.agreed_gathers.push_back(engine->sharded_model().residency().previous_counts().agreed_gathers);
    }
    if (comm->rank() == comm->size() - 1) counts = std::move(mine);
  });
  return counts;
}

class Counts : public ::testing::TestWithParam<int> {};  // stage

TEST_P(Counts, EachUnitIsReducedOnceWhereTheStageSaysSo) {
  for (const bool each : {false, true}) {
    SCOPED_TRACE(each ? "reduce_each_micro_step" : "default");
    Case c = small_units(2, GetParam());
    c.accumulation = 3;
    c.steps = 3;
    c.config.zero.reduce_each_micro_step = each;
    const StepCounts counts = count<Odds>(c, odds_loss);
    ASSERT_GT(counts.num_trainable_units, 3);
    ASSERT_LT(counts.num_trainable_units, counts.num_units) << "the model has frozen units";
    for (const auto& micro_steps : counts.micro_steps) {
      for (size_t micro = 0; micro < micro_steps.size(); ++micro) {
        const bool boundary = micro == micro_steps.size() - 1;
        const int reductions = boundary || each || GetParam() >= 2 ? counts.num_trainable_units : 0;
        // Where all ranks see each other's memory stage 0 leaves the sums in shards
        // too, and the others read them there.
        const bool whole_in_place = GetParam() == 0 && !each && default_backend() != "shm";
        // Stage 0 reduces into shards when it reduces more than once, and needs all of them at the boundary.
        const int gathers = GetParam() == 0 && each && boundary ? reductions : 0;
        EXPECT_EQ(micro_steps[micro].all_reduces, whole_in_place ? reductions : 0);
        EXPECT_EQ(micro_steps[micro].reduce_scatters, whole_in_place ? 0 : reductions);
        EXPECT_EQ(micro_steps[micro].all_gathers, gathers);
        EXPECT_EQ(total(micro_steps[micro]), reductions + gathers) << "and nothing else";
      }
    }
    // The norm is one small all-gather, at every stage.
    for (const CollectiveCounts& step : counts.steps) {
      EXPECT_EQ(step.all_gathers, 1);
      EXPECT_EQ(total(step), 1);
    }
  }
}

class CountsBelowStageThree : public Counts {};

TEST_P(CountsBelowStageThree, OnlyTheUpdatedShardsAreGathered) {
  Case c = small_units(2, GetParam());
  c.steps = 3;
  const StepCounts counts = count<Zoo>(c, zoo_loss);
  const int per_step = GetParam() == 0 ? 0 : counts.num_trainable_units;
  for (int step = 0; step < c.steps; ++step) {
    EXPECT_EQ(counts.gathers[step].all_gathers, per_step) << "the updated shards, once";
    EXPECT_EQ(total(counts.gathers[step]), per_step);
    EXPECT_EQ(total(counts.forward_gathers[step]), 0) << "an operator gathers nothing";
  }
}

TEST_P(Counts, NothingIsAgreedOverTheStoreOnceTheOrderIsKnown) {
  Case c = small_units(2, GetParam());
  c.steps = 4;
  c.accumulation = 2;
  const StepCounts counts = count<Zoo>(c, zoo_loss);
  EXPECT_GT(counts.exchanges[0], 0);
  for (int step = 1; step < c.steps; ++step) EXPECT_EQ(counts.exchanges[step], 0) << step;
}

INSTANTIATE_TEST_SUITE_P(Stages, CountsBelowStageThree, ::testing::Values(0, 1, 2),
                         [](const auto& info) { return str("Stage", info.param); });
INSTANTIATE_TEST_SUITE_P(Stages, Counts, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) { return str("Stage", info.param); });

// What order_test.cc has of one kind of module, of all.
TEST(GathersAtStageThree, OfEachUnitAreTwoAStep) {
  for (const int accumulation : {1, 3}) {
    Case c = small_units(accumulation == 1 ? 2 : 3, 3);
    c.accumulation = accumulation;
    c.steps = 4;
    c.config.zero.unit_numel = 600;  // every leaf module is whole: its operators come one after another
    const StepCounts counts = count<Zoo>(c, zoo_loss, {"embedding.weight", "bag.weight"});
    EXPECT_EQ(counts.embedding_units.size(), 1U);
    EXPECT_GT(counts.num_units, 2 * c.config.zero.communication_buffers)
        << "the cache must be too small for the model";
    for (int step = 1; step < c.steps; ++step) {
      SCOPED_TRACE(str("accumulation ", accumulation, " step ", step));
      EXPECT_EQ(counts.agreed_gathers[step], 0);
      for (int unit = 0; unit < counts.num_units; ++unit)
        EXPECT_LE(counts.unit_gathers[step][unit], 2) << counts.units[unit];
      for (int unit : counts.embedding_units)
        EXPECT_EQ(counts.unit_gathers[step][unit], 1) << "its backward needs no weights";
      const int sum = std::accumulate(counts.unit_gathers[step].begin(), counts.unit_gathers[step].end(), 0);
      if (step >= 2 && accumulation == 1) {
        EXPECT_EQ(counts.gathers[step].all_gathers, sum) << "what Residency counts is what was sent";
      }
      EXPECT_LE(counts.gathers[step].all_gathers, 2 * counts.num_units * accumulation);
    }
  }
}

TEST(GathersAtStageThree, ModulesCutIntoManyUnitsCostLittleMore) {
  Case c = small_units(2, 3);
  c.steps = 4;
  const StepCounts counts = count<Zoo>(c, zoo_loss);  // an LSTM lies in a dozen units, the cache holds three
  for (int step = 1; step < c.steps; ++step) {
    EXPECT_THAT(counts.unit_gathers[step], ::testing::Each(::testing::Le(3)));
    EXPECT_LE(std::accumulate(counts.unit_gathers[step].begin(), counts.unit_gathers[step].end(), 0),
              2 * counts.num_units);
  }
}

TEST(GathersAtStageThree, LambTakesOneMoreSmallAllGather) {
  Case c = small_units(2, 3);
  c.optimizer = "LAMB";
  c.steps = 2;
  for (const CollectiveCounts& step : count<Mlp>(c, mlp_loss).steps) EXPECT_EQ(total(step), 2);
}

}  // namespace
}  // namespace tessera::testing

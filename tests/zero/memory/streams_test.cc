// What a CUDA device is told about order, checked without one (stream_watch.h): every two accesses to a
// unit's buffer, a slot or an accumulator that conflict are ordered, at every stage and however far the host
// is ahead. Passes over shards read raw pointers, so the tests note what these access.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/zero/memory/stream_watch.h"
#include "tests/zero/offload/offload_testing.h"

namespace tessera::zero::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Access = StreamWatch::Access;
using Edge = StreamWatch::Edge;

struct Way {
  int stage = 3;
  bool overlap = true;
  bool done = true;  ///< what Work::test() says: the device has caught up, or never does
  int capacity_units = 2;
  int row = 0;  ///< ranks that shard among them; 0: all
  Tiers tiers = kInMemoryTiers;
  bool each_micro_step = false;
  Edge dropped = Edge::kNone;
  bool alone = false;  ///< one rank without a network: what there is to copy is copied by the compute stream

  std::string name() const {
    return str("stage ", stage, " overlap ", overlap, " done ", done, " capacity ", capacity_units, " row ",
               row, " each ", each_micro_step, " states on tier ", static_cast<int>(tiers.optimizer),
               " values on tier ", static_cast<int>(tiers.parameters), alone ? " alone" : "");
  }
};

class Streams : public OffloadTest {
 protected:
  Change options_of(const Way& way, const std::shared_ptr<comm::HostTransfer>& transfer) const {
    return [=, this](ShardedModelOptions& options) {
      with({.tiers = way.tiers, .transfer = transfer})(options);
      options.residency.capacity_units = way.capacity_units;
      options.residency.overlap = options.reducer.overlap = way.overlap;
      options.reducer.reduce_each_micro_step = way.each_micro_step;
      options.groups.shard = way.row;
    };
  }

  /// The norm reads gradients, the update reads them and writes values. State on the host is the host's.
  static void note_update(ShardedModel& sharded, StreamWatch* watch) {
    if (watch == nullptr) return;
    for (int index = 0; index < sharded.layout().num_units(); ++index) {
      ParamUnit& unit = sharded.unit(index);
      if (!unit.spec.trainable) continue;
      if (unit.placement.gradient == Tier::kDevice)
        watch->note("compute", sharded.gradients().shard(unit), Access::kRead, "update");
      if (unit.placement.optimizer == Tier::kDevice)
        watch->note("compute", unit.local_state().weights, Access::kWrite, "update");
    }
  }

  /// Four steps of two micro-steps and an evaluation; the last layer is used in some only.
  static std::vector<at::Tensor> train(Chain& model, Rig& rig, int rank, StreamWatch* watch) {
    std::vector<at::Tensor> found;
    for (int step = 0; step < 4; ++step) {
      for (const bool last : {false, true}) {
        at::Tensor y = model->forward(batch(rank, 2 * step + last));
        if (step % 2 == 1) y = model->extra->forward(y);
        rig.backward(y.square().sum(), !last, last);
      }
      const GradientSummary summary = rig.sharded->summarize_gradients();
      note_update(*rig.sharded, watch);
      rig.sharded->step(0.5 / (1 + summary.norm));
    }
    rig.sharded->eval();
    {
      const at::NoGradGuard no_grad;
      rig.sharded->begin_forward();
      found.push_back(model->forward(batch(rank, 9)).clone());
      rig.sharded->end_forward();
    }
    for (const at::Tensor& weight : rig.weights()) found.push_back(weight);
    return found;
  }

  std::vector<at::Tensor> train_plainly(const comm::CommunicatorPtr& comm, const Way& way) const {
    Way in_memory = way;
    in_memory.tiers = kInMemoryTiers;
    Chain model(kNumLayers);
    Rig rig(*model, comm, way.stage, options_of(in_memory, nullptr));
    return train(model, rig, comm->rank(), nullptr);
  }

  struct Found {
    std::vector<at::Tensor> values;
    std::set<std::string> violations;
    int64_t num_noted;
  };
  Found watched(const comm::CommunicatorPtr& comm, const Way& way) const {
    const auto watch = std::make_shared<StreamWatch>(way.dropped);
    const comm::CommunicatorPtr network =
        way.alone ? comm : std::make_shared<StreamedCommunicator>(comm, watch, way.done);
    const auto transfer =
        way.tiers.optimizer == Tier::kDevice ? nullptr : std::make_shared<StreamedTransfer>(watch);
    const WatchOperators operators(*watch);
    Chain model(kNumLayers);
    Rig rig(*model, network, way.stage, options_of(way, transfer));
    Found found{.values = train(model, rig, comm->rank(), watch.get()), .violations = {}, .num_noted = 0};
    found.violations = watch->violations();
    found.num_noted = watch->num_noted();
    return found;
  }

  void expect_ordered(int world, Way way) const {
    expect_ordered_as_it_is(world, way);
    way.alone = true;
    if (world == 1) expect_ordered_as_it_is(world, way);
  }
  void expect_ordered_as_it_is(int world, const Way& way) const {
    run_ranks(world, [&](comm::CommunicatorPtr comm) {
      const std::vector<at::Tensor> expected = train_plainly(comm, way);
      const Found found = watched(comm, way);
      EXPECT_THAT(found.violations, IsEmpty()) << "world " << world << " " << way.name();
      EXPECT_TRUE(same_bits(found.values, expected)) << "world " << world << " " << way.name();
      EXPECT_GT(found.num_noted, 500);
    });
  }
};

TEST_F(Streams, ConflictingAccessesAreOrderedAtEveryStage) {
  for (const int world : {1, 2})
    for (int stage = 0; stage <= 3; ++stage)
      for (const bool overlap : {true, false})
        for (const bool done : {true, false})
          expect_ordered(world, {.stage = stage, .overlap = overlap, .done = done});
}

TEST_F(Streams, WithPrefetchAndEviction) {
  for (const int capacity : {1, 2, 4, 100})
    for (const bool done : {true, false}) expect_ordered(2, {.done = done, .capacity_units = capacity});
}

TEST_F(Streams, WhereEachMicroStepIsReduced) {
  for (const int world : {1, 2})
    for (int stage = 0; stage <= 3; ++stage)
      expect_ordered(world, {.stage = stage, .done = false, .each_micro_step = true});
}

TEST_F(Streams, WithRowsOfRanks) {
  for (const bool done : {true, false}) expect_ordered(4, {.done = done, .row = 2});
}

TEST_F(Streams, WithStateOnTheHost) {
  for (const int world : {1, 2})
    for (const bool done : {true, false}) {
      for (int stage = 1; stage <= 3; ++stage)
        expect_ordered(world, {.stage = stage, .done = done, .tiers = kOptimizerOnHost});
      expect_ordered(world, {.done = done, .tiers = kAllOnHost});
    }
}

// -- that it can fail --

TEST_F(Streams, AWaitThatOrdersNothingIsFound) {
  for (int stage = 1; stage <= 3; ++stage)
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      const auto found = watched(comm, {.stage = stage, .dropped = Edge::kWait}).violations;
      EXPECT_THAT(found, Contains(AllOf(HasSubstr("all-gather of unit 1 "), HasSubstr("writes on nccl"),
                                        HasSubstr("aten::"), HasSubstr("reads on compute"))))
          << "stage " << stage;
      EXPECT_THAT(found, Contains(AllOf(HasSubstr("reduce-scatter of unit 1 "), HasSubstr("writes on nccl"),
                                        HasSubstr("on compute"))))
          << "stage " << stage;
    });
}

TEST_F(Streams, ACollectiveThatDoesNotWaitForTheComputeStreamIsFound) {
  for (int stage = 1; stage <= 3; ++stage)
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      const auto found = watched(comm, {.stage = stage, .dropped = Edge::kIssue}).violations;
      EXPECT_THAT(found,
                  Contains(AllOf(HasSubstr("aten::"), HasSubstr("writes on compute, reduce-scatter of unit"),
                                 HasSubstr("writes on nccl"))))
          << "stage " << stage;
      // What has been updated, or is still read by the model.
      EXPECT_THAT(found, Contains(AllOf(HasSubstr("on compute, all-gather of unit"), HasSubstr("on nccl"))))
          << "stage " << stage;
    });
}

TEST_F(Streams, CopiesThatNothingFollowsAreFound) {
  run_ranks(2, [&](comm::CommunicatorPtr comm) {
    const auto with_all = [&](Edge dropped) {
      return watched(comm, {.tiers = kAllOnHost, .dropped = dropped}).violations;
    };
    EXPECT_THAT(with_all(Edge::kFollow), Contains(HasSubstr("a copy of ")));
    EXPECT_THAT(with_all(Edge::kAfter),
                Contains(AllOf(HasSubstr("a copy of "), HasSubstr("on up, all-gather of unit"))));
  });
}

}  // namespace
}  // namespace tessera::zero::testing

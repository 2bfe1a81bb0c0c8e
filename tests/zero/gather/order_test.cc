// The order of gathers: recorded, replayed, and recorded anew when passes change.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/zero/zero_testing.h"
#include "zero/reduce/gradient_hook.h"

namespace tessera::zero::testing {
namespace {

using ::testing::HasSubstr;

TEST(Order, EachUnitIsGatheredTwiceAStep) {
  for (int world : {1, 2}) {
    run_ranks(world, [&](comm::CommunicatorPtr comm) {
      Chain model(6);
      Rig rig(*model, comm, 3);
      for (int step = 0; step < 4; ++step) {
        rig.backward(model->forward(batch(comm->rank(), step)).sum());
        const ResidencyCounts& counts = rig.residency().counts();
        if (world > 1 && in_shared_memory()) {
          EXPECT_EQ(rig.num_gathers(), 0) << "read in place";
          EXPECT_EQ(rig.residency().pool().peak_bytes(), 0);
          rig.update();
          continue;
        }
        for (int unit = 0; unit < 6; ++unit)
          EXPECT_LE(counts.gathers[unit], 2) << "step " << step << " unit " << unit;
        EXPECT_EQ(counts.gathers[6], 0) << "no layer uses it";
        EXPECT_EQ(counts.agreed_gathers > 0, step == 0) << "step " << step;
        // Replay: 6 forward; the last 2 stay for backward, and the first layer's backward needs no weight.
        EXPECT_EQ(step == 0 ? 9 : rig.num_gathers(), 9) << "step " << step;
        EXPECT_LE(rig.residency().max_unsharded(), 2);
        EXPECT_LE(rig.residency().pool().peak_bytes(), 2 * rig.sharded->layout().units()[0].numel * 4);
        rig.update();
      }
    });
  }
}

TEST(Order, PersistentUnitsAreGatheredOnceAStep) {
  Chain model(5);
  Rig rig(*model, alone(), 3,
          [](ShardedModelOptions& options) { options.residency.persistence_numel = kLinearNumel; });
  for (int step = 0; step < 3; ++step) {
    rig.step(model->forward(batch(0, step)).sum());
    EXPECT_EQ(rig.residency().previous_counts().gathers, (std::vector<int>{1, 1, 1, 1, 1, 0}))
        << "step " << step;
  }
}

TEST(Order, WithoutOverlapTheResultsAreTheSame) {
  std::vector<at::Tensor> with;
  for (bool overlap : {true, false}) {
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      Chain model(5);
      Rig rig(*model, comm, 3, [&](ShardedModelOptions& options) {
        options.residency.overlap = options.reducer.overlap = overlap;
      });
      for (int step = 0; step < 3; ++step) rig.step(model->forward(batch(comm->rank(), step)).sum());
      const std::vector<at::Tensor> weights = rig.weights();
      if (comm->rank() != 0) return;
      if (overlap) with = weights;
      EXPECT_TRUE(same_bits(weights, with));
    });
  }
}

/// Keeps the time limits of exchanges, of this group and of those duplicated from it.
class Limits final : public tessera::testing::ForwardingCommunicator {
 public:
  using List = std::vector<std::chrono::milliseconds>;
  Limits(comm::CommunicatorPtr inner, std::shared_ptr<List> list)
      : ForwardingCommunicator(std::move(inner)), list_(std::move(list)) {}
  using Communicator::exchange;
  std::vector<std::string> exchange(const std::string& value, std::string_view label,
                                    std::chrono::milliseconds limit) override {
    list_->push_back(limit);
    return ForwardingCommunicator::exchange(value, label, limit);
  }
  comm::CommunicatorPtr duplicate(std::string_view name) override {
    return std::make_shared<Limits>(ForwardingCommunicator::duplicate(name), list_);
  }

 private:
  std::shared_ptr<List> list_;
};

// A rank that is late (a slow disk, a long evaluation) has as much time for an agreement as for a collective.
TEST(Order, AgreementsHaveTheCommunicatorsTimeLimit) {
  run_ranks(2, [](comm::CommunicatorPtr comm) {
    auto limits = std::make_shared<Limits::List>();
    Chain model(3);
    Rig rig(*model, std::make_shared<Limits>(comm, limits), 3);
    for (int step = 0; step < 2; ++step) {
      rig.step(model->forward(batch(comm->rank(), step)).sum());
      GatheredParameters(*rig.sharded, {"extra.weight"}).close();
    }
    EXPECT_GT(limits->size(), in_shared_memory() ? 2u : 5u);
    for (const std::chrono::milliseconds limit : *limits) EXPECT_EQ(limit, comm->timeout());
  });
}

TEST(Order, AnOrderThatChangesOnAllRanksIsRecordedAnew) {
  const auto loss_of = [](ChainImpl& model, int rank, int step) {
    at::Tensor y = model.forward(batch(rank, step));
    if (step >= 2) y = at::tanh(model.extra->forward(y));
    if (step >= 4) y = model.layers[0]->forward(y);  // in the plan, but at another place
    return y.square().sum();
  };
  for (int capacity : {1, 2, 3, 9}) {
    SCOPED_TRACE(capacity);
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      Chain model(4), reference(4);
      Rig rig(*model, comm, 3,
              [&](ShardedModelOptions& options) { options.residency.capacity_units = capacity; });
      Rig stage_0(*reference, comm, 0);
      std::vector<bool> agreed;
      for (int step = 0; step < 7; ++step) {
        rig.step(loss_of(*model, comm->rank(), step));
        stage_0.step(loss_of(*reference, comm->rank(), step));
        agreed.push_back(rig.residency().previous_counts().agreed_gathers > 0);
      }
      EXPECT_TRUE(same_bits(rig.weights(), stage_0.weights()));
      if (in_shared_memory()) {
        EXPECT_EQ(agreed, std::vector<bool>(7, false));
      } else {
        EXPECT_EQ(agreed, (std::vector<bool>{true, false, true, true, agreed[4], agreed[5], false}))
            << "found out, recorded, replayed";
      }
    });
  }
}

TEST(Order, EvaluationBetweenTrainingSteps) {
  run_ranks(2, [](comm::CommunicatorPtr comm) {
    Chain model(5), reference(5);
    Rig rig(*model, comm, 3);
    Rig stage_2(*reference, comm, 2);
    for (int step = 0; step < 4; ++step) {
      // In the middle of an accumulation window, and after an update; in another order than in training.
      const at::Tensor x = batch(comm->rank(), step);
      rig.backward(model->forward(x).square().sum(), /*first=*/true, /*last=*/false);
      stage_2.backward(reference->forward(x).square().sum(), true, false);
      rig.sharded->eval();
      for (int i = 0; i < 2; ++i) {
        const at::NoGradGuard no_grad;
        rig.sharded->begin_forward();
        const at::Tensor found = model->layers[1]->forward(model->extra->forward(model->forward(x)));
        rig.sharded->end_forward();
        EXPECT_TRUE(at::equal(
            found, reference->layers[1]->forward(reference->extra->forward(reference->forward(x)))));
        EXPECT_EQ(rig.residency().counts().agreed_gathers > 0, step + i == 0 && !in_shared_memory());
      }
      rig.sharded->train();
      rig.backward(model->forward(-x).square().sum(), false, true);
      stage_2.backward(reference->forward(-x).square().sum(), false, true);
      rig.update(0.1);
      stage_2.update(0.1);
    }
    EXPECT_TRUE(same_bits(rig.weights(), stage_2.weights()));
  });
}

TEST(Order, APassMayBeLeftHalfWay) {
  run_ranks(2, [](comm::CommunicatorPtr comm) {
    Chain model(5), reference(5);
    Rig rig(*model, comm, 3);
    Rig stage_0(*reference, comm, 0);
    for (int step = 0; step < 4; ++step) {
      const at::Tensor x = batch(comm->rank(), step);
      at::tanh(model->layers[0]->forward(x));
      if (step > 0 && comm->rank() == 1) model->layers[1]->forward(x);  // further than the other
      rig.sharded->eval();
      rig.sharded->train();
      rig.step(model->forward(x).square().sum());
      stage_0.step(reference->forward(x).square().sum());
    }
    EXPECT_TRUE(same_bits(rig.weights(), stage_0.weights()));
  });
}

TEST(Order, ABackwardThatFailsHalfWayIsNotForgotten) {
  Chain model(2);
  bool fails = true;
  GradientHook::install(&fails, model->parameters().front(), [&] {
    if (fails) throw Error("out of luck");
  });
  Rig rig(*model, alone(), 2);
  EXPECT_THAT(error_of([&] { rig.backward(model->forward(batch(0, 0)).sum()); }), HasSubstr("out of luck"));
  fails = false;
  EXPECT_THAT(error_of([&] { rig.backward(model->forward(batch(0, 0)).sum()); }),
              HasSubstr("failed half-way"));
}

}  // namespace
}  // namespace tessera::zero::testing

// GatheredParameters at every stage, between and inside passes.
#include "zero/gathered_parameters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "tests/support/failing_allocations.h"
#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {
namespace {

using tessera::testing::FailingAllocations;
using ::testing::HasSubstr;

TEST(GatheredParameters, RawPointersCanBeRead) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      Chain model(3), plain(3);
      Rig rig(*model, comm, stage);
      const GatheredParameters gathered(*rig.sharded, {"fc1.weight", "fc2.bias"});
      const auto* values = static_cast<const float*>(model->layers[1]->weight.data_ptr());
      const auto* expected = static_cast<const float*>(plain->layers[1]->weight.data_ptr());
      EXPECT_TRUE(std::equal(expected, expected + kWidth * kWidth, values));
    });
  }
}

TEST(GatheredParameters, WritesOfOneRankArriveOnAll) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      run_ranks(3, [&](comm::CommunicatorPtr comm) {
        Chain model(3), plain(3);
        Rig rig(*model, comm, stage, [&](ShardedModelOptions& options) { options.compute_dtype = dtype; });
        {
          GatheredParameters gathered(*rig.sharded, {"fc1.weight"}, /*modifier_rank=*/1);
          const at::NoGradGuard no_grad;
          model->layers[1]->weight[2].fill_(comm->rank() == 1 ? 0.25
                                                              : 99);  // the others' writes do not count
          gathered.close();
        }
        const at::Tensor master = rig.sharded->full_parameter("fc1.weight");
        EXPECT_TRUE(at::equal(master[2], at::full({kWidth}, 0.25)));
        for (int64_t row : {0, 1, 3, 7})
          EXPECT_TRUE(at::equal(master[row], plain->layers[1]->weight[row]))
              << "fp32 digits of what was not written stay";
        EXPECT_TRUE(at::equal(rig.sharded->full_parameter("fc1.bias"), plain->layers[1]->bias));
        EXPECT_TRUE(at::equal(model->layers[1]->weight[2].to(at::kFloat), at::full({kWidth}, 0.25)));
        rig.residency().rethrow();
      });
    }
  }
}

TEST(GatheredParameters, WritesWithoutAModifierRankAreRefused) {
  Chain model(2);
  Rig rig(*model, alone(), 3);
  const GatheredParameters gathered(*rig.sharded, {"fc1.weight"});
  const at::NoGradGuard no_grad;
  EXPECT_THAT(message_of([&] { model->layers[1]->weight.zero_(); }),
              HasSubstr("aten::zero_ writes into unit 1"));
  EXPECT_THAT(error_of([&] { rig.residency().rethrow(); }), HasSubstr("aten::zero_ writes into unit 1"));
}

TEST(GatheredParameters, TheRightToWriteEndsWithItsScope) {
  for (int stage : {1, 3}) {
    Chain model(2);
    Rig rig(*model, alone(), stage);
    const at::NoGradGuard no_grad;
    const GatheredParameters reading(*rig.sharded, {"fc1.weight"});
    {
      const GatheredParameters writing(*rig.sharded, {"fc1.weight"}, 0);
      model->layers[1]->weight.zero_();
    }
    rig.residency().rethrow();
    EXPECT_THAT(message_of([&] { model->layers[1]->weight.fill_(1); }), HasSubstr("aten::fill_"))
        << "stage " << stage;
    EXPECT_THAT(error_of([&] { rig.residency().rethrow(); }), HasSubstr("aten::fill_")) << "stage " << stage;
  }
}

TEST(GatheredParameters, Nested) {
  run_ranks(2, [](comm::CommunicatorPtr comm) {
    Chain model(3);
    Rig rig(*model, comm, 3);
    const at::NoGradGuard no_grad;
    GatheredParameters outer(*rig.sharded, {}, 0);
    EXPECT_EQ(rig.residency().num_unsharded(), 4);
    {
      const GatheredParameters inner(*rig.sharded, {"fc1.weight"});
      if (comm->rank() == 0) model->layers[1]->weight.fill_(3);
    }
    if (comm->rank() == 0) model->layers[2]->weight.fill_(4);
    outer.close();
    outer.close();
    EXPECT_EQ(rig.residency().num_unsharded(), in_shared_memory() ? 4 : 0);
    EXPECT_EQ(rig.sharded->full_parameter("fc1.weight").sum().item<double>(), 3.0 * kWidth * kWidth);
    EXPECT_EQ(rig.sharded->full_parameter("fc2.weight").sum().item<double>(), 4.0 * kWidth * kWidth);
  });
}

/// Anywhere in a step, on ranks that stand at different places of the plan.
TEST(GatheredParameters, BetweenAndInsidePasses) {
  for (const char* name : {"fc0.weight", "fc2.weight", "fc4.weight", "extra.weight"}) {
    for (int place = 0; place < 4; ++place) {
      SCOPED_TRACE(str(name, " at place ", place));
      run_ranks(2, [&](comm::CommunicatorPtr comm) {
        Chain model(5), reference(5);
        Rig rig(*model, comm, 3), stage_0(*reference, comm, 0);
        const auto write = [&](ShardedModel& sharded, ChainImpl& chain, int step) {
          GatheredParameters gathered(sharded, {name}, 0);
          const at::NoGradGuard no_grad;
          // Not through `parameter` itself: autograd would report that a saved view was modified.
          at::Tensor parameter = chain.named_parameters()[name];
          if (comm->rank() == 0)
            static_cast<float*>(parameter.data_ptr())[5] = 0.01f * static_cast<float>(step);
          gathered.close();
        };
        const auto train = [&](Rig& of, ChainImpl& chain, int step) {
          at::Tensor x = batch(comm->rank(), step);
          if (place == 0) write(*of.sharded, chain, step);
          for (int i = 0; i < 5; ++i) {
            // Once the order is known rank 1 skips layer 1, so that at place 1 it has issued fewer gathers
            // than rank 0.
            const bool skips = i == 1 && step > 0 && comm->rank() == 1;
            if (!skips) x = at::tanh(chain.layers[i]->forward(x));
            if (place == 1 && i == 1) write(*of.sharded, chain, step);
          }
          if (place == 2) write(*of.sharded, chain, step);
          of.backward(x.square().sum());
          if (place == 3) write(*of.sharded, chain, step);
          of.update(0.1);
        };
        for (int step = 0; step < 4; ++step) {
          train(rig, *model, step);
          train(stage_0, *reference, step);
        }
        EXPECT_TRUE(same_bits(rig.weights(), stage_0.weights()));
        EXPECT_LE(rig.residency().num_unsharded(), in_shared_memory() ? 6 : 2);
      });
    }
  }
}

TEST(GatheredParameters, HeldWhileTheModelRuns) {
  run_ranks(2, [](comm::CommunicatorPtr comm) {
    Chain model(5), reference(5);
    Rig rig(*model, comm, 3), stage_0(*reference, comm, 0);
    const auto train = [&](Rig& of, ChainImpl& chain, int step) {
      const at::Tensor x = batch(comm->rank(), step);
      at::Tensor loss;
      {
        GatheredParameters gathered(*of.sharded, {"fc0.weight", "fc3.weight"}, 0);
        for (int i : {0, 3}) {  // by raw pointer, so that it is not part of the order of use
          auto* values = static_cast<float*>(chain.layers[i]->weight.data_ptr());
          std::transform(values, values + kWidth * kWidth, values, [](float value) { return value * 1.5f; });
        }
        loss = chain.forward(x).square().sum();  // must see what was written: no gather may undo it
        gathered.close();
      }
      of.backward(loss);
      of.update(0.1);
    };
    for (int step = 0; step < 4; ++step) {
      train(rig, *model, step);
      train(stage_0, *reference, step);
    }
    EXPECT_TRUE(same_bits(rig.weights(), stage_0.weights()));
  });
}

// Where the plan needs a unit that is held, closing the GatheredParameters must not release it.
TEST(GatheredParameters, AUnitThatThePlanHasTakenOverStays) {
  if (in_shared_memory()) GTEST_SKIP() << "nothing is gathered";
  run_ranks(2, [](comm::CommunicatorPtr comm) {
    Chain model(5);
    Rig rig(*model, comm, 3);
    for (int step = 0; step < 4; ++step) {
      at::Tensor x = batch(comm->rank(), step);
      {
        const GatheredParameters gathered(*rig.sharded, {"fc3.weight"});
        for (int i = 0; i < 3; ++i) x = at::tanh(model->layers[i]->forward(x));
      }
      for (int i = 3; i < 5; ++i) x = at::tanh(model->layers[i]->forward(x));
      EXPECT_EQ(rig.residency().counts().agreed_gathers > 0, step == 0)
          << "step " << step << ": it was gathered again";
      rig.step(x.square().sum());
    }
  });
}

TEST(GatheredParameters, StepWhileOneIsHeldIsRefused) {
  for (int stage : {1, 2, 3}) {
    Chain model(2);
    Rig rig(*model, alone(), stage);
    rig.backward(model->forward(batch(0, 0)).sum());
    GatheredParameters gathered(*rig.sharded, {"fc1.weight"});
    EXPECT_THAT(error_of([&] { rig.update(); }), HasSubstr("GatheredParameters that holds unit 1"))
        << "stage " << stage;
    gathered.close();
    rig.update();
  }
}

TEST(GatheredParameters, BadArguments) {
  Chain model(2);
  Rig rig(*model, alone(), 3);
  EXPECT_THAT(error_of([&] { GatheredParameters(*rig.sharded, {"fc9.weight"}); }),
              HasSubstr("no parameter named fc9.weight"));
  EXPECT_THAT(error_of([&] { GatheredParameters(*rig.sharded, {}, 1); }), HasSubstr("modifier_rank 1"));
}

TEST(GatheredParameters, RanksThatAskForDifferentOnesAreNamed) {
  const std::string error = error_of([] {
    run_ranks(2, [](comm::CommunicatorPtr comm) {
      Chain model(3);
      Rig rig(*model, comm, 3);
      GatheredParameters(*rig.sharded, {comm->rank() == 0 ? "fc0.weight" : "fc1.weight"});
    });
  });
  EXPECT_THAT(error, HasSubstr(in_shared_memory() ? "" : "every rank must gather the same parameters"));
}

/// The weights after two steps; between them the last rank has no memory for a GatheredParameters.
std::vector<at::Tensor> trained(const comm::CommunicatorPtr& comm, bool fail) {
  Chain model(2);
  Rig rig(*model, comm, 3);
  rig.step(model->forward(batch(comm->rank(), 0)).sum());
  const bool last = comm->rank() == comm->size() - 1;
  std::string error;
  {
    const FailingAllocations failing(fail && last ? 0 : std::numeric_limits<int64_t>::max());
    error = error_of([&] { GatheredParameters(*rig.sharded, {}, 0); });
  }
  if (fail) {
    EXPECT_THAT(error, HasSubstr(last ? "can't allocate memory" : "rank 1 has no memory for the parameters"));
  } else {
    EXPECT_EQ(error, "");
  }
  rig.step(model->forward(batch(comm->rank(), 1)).sum());
  rig.sharded->check_usable();
  return rig.weights();
}

TEST(GatheredParameters, WithoutMemoryForThemTrainingContinues) {
  EXPECT_TRUE(same_bits(trained(alone(), true), trained(alone(), false)));
  if (in_shared_memory()) return;  // nothing is gathered; only the rank that writes needs memory
  run_ranks(2, [](comm::CommunicatorPtr comm) {
    EXPECT_TRUE(same_bits(trained(comm, true), trained(comm->duplicate("again"), false)));
  });
}

TEST(GatheredParameters, AnExceptionInsideLetsGo) {
  Chain model(2);
  Rig rig(*model, alone(), 3);
  EXPECT_EQ(error_of([&] {
              const GatheredParameters gathered(*rig.sharded, {}, 0);
              throw Error("changed my mind");
            }),
            "changed my mind");
  EXPECT_EQ(rig.residency().num_unsharded(), 0);
  rig.step(model->forward(batch(0, 0)).sum());
}

}  // namespace
}  // namespace tessera::zero::testing

// Training and evaluation in turn: batch statistics, buffers, dropout.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/str.h"
#include "tests/support/losses.h"

namespace tessera::testing {
namespace {

struct NormRun {
  std::vector<double> losses;
  std::vector<at::Tensor> evaluations;
  Tensors weights, buffers;
};

/// Trains with batches of its own on each rank; `evaluate`: three evaluation batches after every second step.
NormRun norm_run(int world, int stage, bool evaluate) {
  NormRun run;
  on_ranks(world, [&](comm::CommunicatorPtr comm) {
    Case c = small_units(world, stage);
    c.accumulation = 2;
    c.micro_batch = 6;
    NormNet model;
    fill_parameters(*model, 1);
    auto engine = initialize(model, engine_config(c), comm);
    NormRun mine;
    for (int step = 0; step < 5; ++step) {
      for (int micro = 0; micro < 2; ++micro) {
        const uint64_t seed = 1000 * (comm->rank() + 1) + 10 * step + micro;
        const at::Tensor loss =
            at::mse_loss(engine->forward(randn({6, 6}, seed) + comm->rank()), randn({6, 3}, seed + 500));
        mine.losses.push_back(loss.item<double>());
        engine->backward(loss);
        engine->step();
        if (!evaluate || micro == 1 || step % 2 == 0) continue;
        engine->eval();  // between two micro-steps, even
        EXPECT_FALSE(model->norm->is_training());
        const at::NoGradGuard no_grad;
        for (int batch = 0; batch < 3; ++batch)
          mine.evaluations.push_back(engine->forward(randn({4, 6}, 7000 + batch)));
        engine->train();
        EXPECT_TRUE(model->norm->is_training());
      }
    }
    mine.weights = full_parameters(*engine);
    engine->eval();
    for (const auto& item : model->named_buffers()) mine.buffers[item.key()] = item.value().clone();
    const at::Tensor mean = mine.buffers["norm.running_mean"], all = at::empty({world * mean.numel()});
    comm->all_gather(all, mean, "means")->wait();
    for (int rank = 0; rank < world; ++rank)
      EXPECT_TRUE(at::equal(all.narrow(0, rank * 24, 24), mean)) << "buffers are rank 0's";
    if (comm->rank() == 0) run = std::move(mine);
  });
  return run;
}

void expect_same_run(const NormRun& a, const NormRun& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_TRUE(bit_equal(a.weights, b.weights));
  EXPECT_TRUE(bit_equal(a.buffers, b.buffers));
  ASSERT_EQ(a.evaluations.size(), b.evaluations.size());
  for (size_t i = 0; i < a.evaluations.size(); ++i)
    EXPECT_TRUE(at::equal(a.evaluations[i], b.evaluations[i])) << i;
}

TEST(Modes, BatchNormTrainsAndEvaluatesToTheSameBitsAtEveryStage) {
  NormRun runs[4];
  for (int stage = 0; stage <= 3; ++stage) runs[stage] = norm_run(2, stage, /*evaluate=*/true);
  ASSERT_EQ(runs[0].evaluations.size(), 6U);
  ASSERT_FALSE(at::equal(runs[0].evaluations[0], runs[0].evaluations[3]))
      << "the model has changed in between";
  // Sums of micro-steps have another order in {0, 1} than in {2, 3}.
  expect_same_run(runs[1], runs[0]);
  expect_same_run(runs[3], runs[2]);
  for (size_t i = 0; i < runs[0].losses.size(); ++i) EXPECT_NEAR(runs[2].losses[i], runs[0].losses[i], 1e-5);
  for (int stage = 1; stage <= 3; ++stage) expect_same_run(norm_run(1, stage, true), norm_run(1, 0, true));
}

TEST(Modes, EvaluationInBetweenDoesNotDisturbTraining) {
  for (int stage = 0; stage <= 3; ++stage) {
    SCOPED_TRACE(stage);
    const NormRun with = norm_run(1, stage, true), without = norm_run(1, stage, false);
    EXPECT_EQ(with.losses, without.losses);
    EXPECT_TRUE(bit_equal(with.weights, without.weights));
  }
}

TEST(Modes, BuffersAreTheRanksOwnInTrainingAndRankZerosInEvaluation) {
  on_ranks(2, [](comm::CommunicatorPtr comm) {
    NormNet model;
    auto engine = initialize(model, engine_config(small_units(2, 3)), comm);
    engine->backward(engine->forward(randn({6, 6}, comm->rank()) + 10 * comm->rank()).square().mean());
    engine->step();
    const at::Tensor own = model->norm->running_mean.clone();
    engine->eval();
    EXPECT_EQ(at::equal(model->norm->running_mean, own), comm->rank() == 0);
  });
}

TEST(Modes, SubmodulesTheUserPutIntoEvaluationStayThereUntilTrainIsCalled) {
  on_ranks(1, [](comm::CommunicatorPtr comm) {
    NormNet model;
    model->norm->eval();
    auto engine = initialize(model, engine_config(small_units(1, 2)), comm);
    EXPECT_TRUE(model->is_training());
    EXPECT_FALSE(model->norm->is_training());
    engine->train();
    EXPECT_TRUE(model->norm->is_training());
    model->eval();
    engine.reset();  // a model belongs to one engine
    auto again = initialize(model, engine_config(small_units(1, 2)), comm);
    EXPECT_TRUE(model->is_training()) << "a model in evaluation mode starts in training mode";
  });
}

TEST(Modes, EvaluationBeforeTheFirstStepAndTwiceInARow) {
  at::Tensor results[4];
  for (int stage = 0; stage <= 3; ++stage)
    on_ranks(2, [&](comm::CommunicatorPtr comm) {
      NormNet model;
      fill_parameters(*model, 1);
      auto engine = initialize(model, engine_config(small_units(2, stage)), comm);
      engine->eval();
      engine->eval();
      const at::Tensor result = engine->forward(randn({4, 6}, 1));
      EXPECT_TRUE(at::equal(engine->forward(randn({4, 6}, 1)), result));
      engine->train();
      engine->train();
      engine->backward(engine->forward(randn({4, 6}, 2)).square().mean());
      engine->step();
      EXPECT_EQ(engine->global_steps(), 1);
      if (comm->rank() == 0) results[stage] = result.detach();
    });
  for (int stage = 1; stage <= 3; ++stage) EXPECT_TRUE(at::equal(results[stage], results[0]));
}

}  // namespace
}  // namespace tessera::testing

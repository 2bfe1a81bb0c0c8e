// Ranks whose order of use differs: errors name them, and units that only some ranks use are no error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "tests/comm/run_ranks.h"
#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Runs `body` on two ranks that are expected to fail. Returns their errors.
std::array<std::string, 2> errors_of_two(const std::function<void(comm::CommunicatorPtr)>& body) {
  std::array<std::string, 2> errors;
  error_of([&] {
    run_ranks(2, [&](comm::CommunicatorPtr comm) {
      try {
        body(comm);
      } catch (const std::exception& error) {  // an operator's own, too
        errors[comm->rank()] = comm::error_message(error);
        throw;
      }
    });
  });
  return errors;
}

TEST(Order, RanksThatDifferInTheFirstPassAreNamed) {
  const auto errors = errors_of_two([](comm::CommunicatorPtr comm) {
    Chain model(2);
    Rig rig(*model, comm, 3);
    at::Tensor x = batch(0, 0);
    for (int i : comm->rank() == 0 ? std::vector<int>{0, 1} : std::vector<int>{1, 0})
      x = model->layers[i]->forward(x);
    rig.backward(x.sum());
  });
  for (const std::string& error : errors) {
    if (in_shared_memory()) {
      EXPECT_EQ(error, "") << "nothing is gathered, so they may";
    } else {
      EXPECT_THAT(error,
                  AllOf(HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr("unit 0 (fc0.weight, fc0.bias)"),
                        HasSubstr("unit 1 (fc1.weight, fc1.bias)"),
                        HasSubstr("set zero_optimization.stage to 2, or")));
    }
  }
}

TEST(Order, ARankThatStopsInTheFirstPassIsNamed) {
  const auto errors = errors_of_two([](comm::CommunicatorPtr comm) {
    Chain model(2);
    Rig rig(*model, comm, 3);
    if (comm->rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1'500));
      throw CommError("late");
    }
    rig.backward(model->forward(batch(0, 0)).sum());
  });
  EXPECT_THAT(errors[0], AllOf(HasSubstr("rank 1"),
                               HasSubstr(in_shared_memory() ? "" : "unit 0 (fc0.weight, fc0.bias)")));
}

TEST(Order, ARankThatNeedsAnotherUnitInReplayIsNamed) {
  const auto errors = errors_of_two([](comm::CommunicatorPtr comm) {
    Chain model(3);
    Rig rig(*model, comm, 3);
    for (int step = 0; step < 3; ++step) {
      at::Tensor y = model->forward(batch(comm->rank(), step));
      if (step == 2 && comm->rank() == 1) y = model->extra->forward(y);
      rig.step(y.sum());
    }
  });
  // Each waits for the other, in another group: both errors say which rank waits for what. In one group they
  // have issued different collectives.
  for (const std::string& error : errors) {
    if (in_shared_memory()) {
      EXPECT_EQ(error, "") << "it is there on every rank";
      continue;
    }
    EXPECT_THAT(
        error,
        AllOf(HasSubstr("the ranks wait for each other: rank 0 waits in "),
              HasSubstr("; rank 1 waits in exchange of \"gather of unit 3 (extra.weight, extra.bias)")));
  }
  if (!in_shared_memory()) {
    EXPECT_THAT(errors[1], HasSubstr("set zero_optimization.stage to 2, or"));
  }
}

/// A loss of the layers `used` only, in that order.
at::Tensor loss_through(ChainImpl& model, const std::vector<int>& used, const at::Tensor& x) {
  return model.through(used, x).square().sum();
}

/// Rank 1 uses some layers only from the second step on: gradients must be plain autograd's of the mean loss.
void expect_skipping_works(const std::vector<int>& rank_1_uses, bool overlap) {
  const std::vector<int> all{0, 1, 2, 3, 4, 5};
  Chain plain(6);
  const std::vector<at::Tensor> expected = plain_gradients(
      *plain, (loss_through(*plain, all, batch(0, 9)) + loss_through(*plain, rank_1_uses, batch(1, 9))) / 2);
  run_ranks(2, [&](comm::CommunicatorPtr comm) {
    Chain model(6);
    Rig rig(*model, comm, 3, [&](ShardedModelOptions& options) {
      options.residency.overlap = options.reducer.overlap = overlap;
      options.reducer.hook_wait_limit = std::chrono::milliseconds(100);
    });
    for (int step = 0; step < 4; ++step) {
      rig.backward(
          loss_through(*model, step > 0 && comm->rank() == 1 ? rank_1_uses : all, batch(comm->rank(), 9)));
      EXPECT_LT(step == 0 ? 0 : largest_difference(rig.gradients(), expected), 1e-5) << "step " << step;
      EXPECT_EQ(rig.residency().counts().agreed_gathers > 0, step == 0 && !in_shared_memory())
          << "step " << step;
      rig.sharded->skip_step();
    }
  });
}

TEST(Order, ARankMaySkipUnitsInReplay) {
  for (bool overlap : {true, false}) {
    expect_skipping_works({0, 2, 3, 5}, overlap);
    expect_skipping_works({0, 1, 2}, overlap);
    expect_skipping_works({3, 4, 5}, overlap);  // the tail of its backward: others wait for its gathers
    expect_skipping_works({2}, overlap);
  }
}

// Rank 1 skips a unit, so it has issued fewer gathers than the others when it calls GatheredParameters. Ranks
// that wait for a while afterwards must not report that as a difference.
TEST(Order, CallsInTheMiddleDoNotCountAsGathers) {
  comm::testing::run_ranks(
      3, {.backend = tessera::testing::default_backend(), .timeout = std::chrono::seconds(2)},
      [](comm::CommunicatorPtr comm) {
        Chain model(6);
        Rig rig(*model, comm, 3);
        for (int step = 0; step < 4; ++step) {
          at::Tensor x = batch(comm->rank(), step);
          for (int i : {0, 1, 2}) {
            if (step == 0 || comm->rank() != 1 || i != 2) x = at::tanh(model->layers[i]->forward(x));
          }
          GatheredParameters(*rig.sharded, {"extra.weight"}).close();
          for (int i : {3, 4, 5}) x = at::tanh(model->layers[i]->forward(x));
          rig.step(x.square().sum());
          if (step >= 2 && comm->rank() == 2)
            std::this_thread::sleep_for(std::chrono::milliseconds(1'200));  // half the limit, and more
        }
      });
}

}  // namespace
}  // namespace tessera::zero::testing

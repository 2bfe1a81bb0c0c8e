// A failure that no operator and no call has thrown: the process must not end as if all had gone well.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>

#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {
namespace {

using ::testing::ExitedWithCode;

/// A model whose next gather fails, and takes what an operator reads of it: only a view.
struct Failed {
  Failed() {
    rig.emplace(*model, std::make_shared<FailingCommunicator>(alone(), plan), 3);
    plan->at = plan->count;
    EXPECT_EQ(model->layers[0]->weight.t().numel(), kWidth * kWidth);
  }
  const std::shared_ptr<FailurePlan> plan = std::make_shared<FailurePlan>();
  Chain model{2};
  std::optional<Rig> rig;
};

class KeptFailureDeathTest : public ::testing::Test {
 protected:
  void SetUp() override { ::testing::GTEST_FLAG(death_test_style) = "threadsafe"; }
};

constexpr const char* kSaid = "error: the cable was pulled \\(met where it could not be thrown";

TEST_F(KeptFailureDeathTest, ThatNobodyWasToldOfFailsTheProcess) {
  EXPECT_EXIT(
      {
        const Failed failed;
        std::exit(0);
      },
      ExitedWithCode(1), kSaid);
}

TEST_F(KeptFailureDeathTest, AlsoOnceTheEngineIsGone) {
  EXPECT_EXIT(
      {
        {
          const Failed failed;
        }
        std::exit(0);
      },
      ExitedWithCode(1), kSaid);
}

TEST_F(KeptFailureDeathTest, LeavesAnotherStatusAsItIs) {
  EXPECT_EXIT(
      {
        const Failed failed;
        std::exit(3);
      },
      ExitedWithCode(3), "");
}

TEST_F(KeptFailureDeathTest, ThatAnOperatorHasThrownIsTheCallersOwn) {
  EXPECT_EXIT(
      {
        const Failed failed;
        const bool thrown =
            message_of([&] { failed.model->layers[0]->weight.sum(); }) == "the cable was pulled";
        std::exit(thrown ? 0 : 9);
      },
      ExitedWithCode(0), "");
}

TEST_F(KeptFailureDeathTest, ThatACallHasThrownIsTheCallersOwn) {
  EXPECT_EXIT(
      {
        Failed failed;
        const bool thrown = error_of([&] { failed.rig->sharded->check_usable(); }) == "the cable was pulled";
        std::exit(thrown ? 0 : 9);
      },
      ExitedWithCode(0), "");
}

TEST_F(KeptFailureDeathTest, IsNotForgottenUntold) {
  EXPECT_EXIT(
      {
        Failed failed;
        failed.plan->at = -1;
        const std::string first = error_of([&] { failed.rig->sharded->drop_gradients(); });
        failed.rig->sharded->drop_gradients();
        std::exit(first == "the cable was pulled" ? 0 : 9);
      },
      ExitedWithCode(0), "");
}

}  // namespace
}  // namespace tessera::zero::testing

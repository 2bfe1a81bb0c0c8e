// A failure that no operator and no call has thrown: the process must not end as if all had gone well.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>

#include "tests/zero/zero_testing.h"

namespace tessera::zero::testing {
namespace {

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

struct Ending {
  friend void PrintTo(const Ending& ending, std::ostream* out) { *out << ending.name; }
  const char* name;
  void (*end)();  ///< the process
  int code;
  const char* said = "";
};

constexpr const char* kSaid = "error: the cable was pulled \\(met where it could not be thrown";

const Ending kEndings[] = {{"NobodyWasTold",
                            [] {
                              const Failed failed;
                              std::exit(0);
                            },
                            1, kSaid},
                           {"TheEngineIsGone",
                            [] {
                              {
                                const Failed failed;
                              }
                              std::exit(0);
                            },
                            1, kSaid},
                           {"AnotherStatusStays",
                            [] {
                              const Failed failed;
                              std::exit(3);
                            },
                            3},
                           {"AnOperatorHasThrownIt",
                            [] {
                              const Failed failed;
                              const auto read = [&] { failed.model->layers[0]->weight.sum(); };
                              std::exit(message_of(read) == "the cable was pulled" ? 0 : 9);
                            },
                            0},
                           {"ACallHasThrownIt",
                            [] {
                              Failed failed;
                              const auto call = [&] { failed.rig->sharded->check_usable(); };
                              std::exit(error_of(call) == "the cable was pulled" ? 0 : 9);
                            },
                            0},
                           {"ItIsNotForgottenUntold",
                            [] {
                              Failed failed;
                              failed.plan->at = -1;
                              const std::string first =
                                  error_of([&] { failed.rig->sharded->drop_gradients(); });
                              failed.rig->sharded->drop_gradients();
                              std::exit(first == "the cable was pulled" ? 0 : 9);
                            },
                            0}};

class KeptFailureDeathTest : public ::testing::TestWithParam<Ending> {};
INSTANTIATE_TEST_SUITE_P(Endings, KeptFailureDeathTest, ::testing::ValuesIn(kEndings),
                         [](const auto& info) { return info.param.name; });

TEST_P(KeptFailureDeathTest, HasTheStatus) {
  TESSERA_ON_ONE_BACKEND();
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(GetParam().end(), ::testing::ExitedWithCode(GetParam().code), GetParam().said);
}

}  // namespace
}  // namespace tessera::zero::testing

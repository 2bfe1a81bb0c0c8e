#include "comm/init/agreement.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "comm/init/init.h"
#include "core/error.h"
#include "tests/comm/comm_testing.h"
#include "tests/comm/run_ranks.h"

namespace tessera::comm {
namespace {

using tessera::testing::error_of;

class Agreement : public testing::EachBackend {};
INSTANTIATE_TEST_SUITE_P(Backends, Agreement, ::testing::Values("gloo", "shm", "hybrid", "staged"),
                         testing::backend_name);

TEST_P(Agreement, AFailureOfOneRankIsAllRanks) {
  testing::run_ranks(3, testing::quick_options(GetParam()), [](CommunicatorPtr comm) {
    EXPECT_EQ(failure_on_any(*comm, "test", [] {}), "");
    const auto fail_on = [&](int first) {
      return [&, first] {
        if (comm->rank() >= first) throw Error("a file is missing\nand more");
      };
    };
    EXPECT_EQ(error_of<DataError>([&] { on_all_ranks<DataError>(*comm, "test", fail_on(1)); }),
              "rank 1: a file is missing");
    EXPECT_EQ(error_of<ConfigError>([&] { on_all_ranks<ConfigError>(*comm, "test", fail_on(0)); }),
              "a file is missing");
    EXPECT_EQ(failure_on_any(*comm, "test", [] { throw Error(""); }), "unknown error")
        << "no message is a failure too";
  });
}

TEST_P(Agreement, RankZerosAnswerIsAllRanks) {
  testing::run_ranks(2, testing::quick_options(GetParam()), [](CommunicatorPtr comm) {
    int num_asked = 0;
    const auto answer = [&](const std::string& text) {
      return from_rank_0<DataError>(*comm, "test", [&] { return ++num_asked, text; });
    };
    EXPECT_EQ(answer(comm->rank() == 0 ? "global_step10" : "another"), "global_step10");
    EXPECT_EQ(answer(""), "");
    EXPECT_EQ(num_asked, comm->rank() == 0 ? 2 : 0);
    const auto fail = [&]() -> std::string { TORCH_CHECK(false, "no such operator"); };
    EXPECT_EQ(error_of<DataError>([&] { from_rank_0<DataError>(*comm, "test", fail); }), "no such operator")
        << "without a back-trace";
  });
}

}  // namespace
}  // namespace tessera::comm

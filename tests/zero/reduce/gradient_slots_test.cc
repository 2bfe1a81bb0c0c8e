// Reductions in one order, through a ring of slots.
#include "zero/plan/gradient_slots.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/backend.h"
#include "tests/zero/kernels/vectors.h"

namespace tessera::zero::testing {
namespace {

TEST(Reducer, TheOrderIsRankZeros) {
  run_ranks(3, [](comm::CommunicatorPtr comm) {
    Vectors vectors(4, comm, at_stage(2));
    EXPECT_EQ(vectors.order->units(), (std::vector<int>{3, 2, 1, 0}))
        << "at first the reverse of registration";
    const std::vector<int> order =
        comm->rank() == 0 ? std::vector<int>{1, 3, 0, 2} : std::vector<int>{2, 0, 1, 3};
    for (int step = 0; step < 3; ++step) {
      vectors.backward({1, 2, 3, 4}, order);
      EXPECT_EQ(vectors.order->units(), (std::vector<int>{1, 3, 0, 2})) << "rank " << comm->rank();
      EXPECT_TRUE(vectors.hold({1, 2, 3, 4}));
    }
  });
}

TEST(Reducer, AnUnusedFirstUnitBlocksNothing) {
  for (int num_slots : {1, 2, 3}) {
    for (int stage = 0; stage <= 3; ++stage) {
      run_ranks(3, [&](comm::CommunicatorPtr comm) {
        StageOptions options = at_stage(stage);
        options.num_slots = num_slots;
        Vectors vectors(6, comm, options);
        for (int step = 0; step < 3; ++step) {
          vectors.backward({1, 2, 3, 4, 5, 0});  // the last is the first in the order
          EXPECT_TRUE(vectors.hold({1, 2, 3, 4, 5, 0})) << "slots " << num_slots << " stage " << stage;
          EXPECT_LE(vectors.most_slots_in_use(), num_slots);
          EXPECT_LE(vectors.reducer->slot_bytes(), num_slots * kNumel * 4);
          EXPECT_EQ(vectors.reducer->slot_bytes() > 0, stage >= 2) << "stages 0 and 1 reduce in place";
          for (const at::Tensor& parameter : vectors.parameters) EXPECT_FALSE(parameter.grad().defined());
        }
      });
    }
  }
}

TEST(Reducer, UnitsOfManySizesShareOneBuffer) {
  TESSERA_ON_ONE_BACKEND();
  const std::vector<int64_t> numels{96, 480, 64, 150, 64, 960, 90, 64, 256, 64};  // some with padding
  const std::vector<std::vector<int>> orders{
      {9, 8, 7, 6, 5, 4, 3, 2, 1, 0}, {3, 7, 1, 9, 5, 0, 2, 4, 8, 6}, {5, 6, 0, 1, 2, 9, 8, 7, 3, 4}};
  for (const char* backend : {"gloo", "shm"}) {
    for (int num_slots : {1, 3, 6}) {
      comm::run_threads(
          2, {.backend = backend, .timeout = std::chrono::seconds(20)}, [&](comm::CommunicatorPtr comm) {
            StageOptions options = at_stage(2);
            options.num_slots = num_slots;
            Vectors vectors(numels, comm, options);
            for (int step = 0; step < 9; ++step) {
              const auto factors_of = [&](int rank) {
                Factors factors;
                for (int i = 0; i < 10; ++i)
                  factors.push_back((i + 3 * step) % 10 == 0 ? 0 : 1 + i + 2 * step + 2 * rank);
                return factors;
              };
              vectors.backward(factors_of(comm->rank()), orders[(step + comm->rank()) % 3]);
              EXPECT_TRUE(vectors.hold(mean_over_ranks(2, factors_of)))
                  << backend << " step " << step << " slots " << num_slots;
            }
            int64_t largest = 0, sum = 0;
            for (const UnitSpec& unit : vectors.layout->units()) {
              largest = std::max(largest, unit.numel);
              sum += unit.numel;
            }
            EXPECT_EQ(vectors.reducer->slot_bytes(), 4 * std::max(largest, num_slots * sum / 10));
          });
    }
  }
}

}  // namespace
}  // namespace tessera::zero::testing

#include "comm/init/cuda_choice.h"

#include <gtest/gtest.h>

#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using testing::error_of;

TEST(CudaChoice, EachRankHasItsOwnWhereThereAreEnough) {
  for (const bool may_share : {false, true})
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(choose_cuda_device({4, 4}, rank, 4, may_share), rank);
      EXPECT_EQ(choose_cuda_device({8, 0}, rank, 4, may_share), rank);
    }
}

// Slurm's --gpus-per-task=1: each rank sees one device of several.
TEST(CudaChoice, TheOneThatARankSeesIsItsOwnWhereTheHostHasOneForEach) {
  EXPECT_EQ(choose_cuda_device({1, 4}, 1, 2, false), 0);
  EXPECT_EQ(choose_cuda_device({1, 4}, 3, 4, false), 0);
  for (const int on_host : {0, 1, 3})
    EXPECT_EQ(error_of([&] { choose_cuda_device({1, on_host}, 1, 4, false); }),
              "this host has 1 CUDA device for 4 ranks: expected one for each rank, or comm.backend "
              "\"staged\", over "
              "which ranks can share a device");
}

TEST(CudaChoice, RanksShareOnlyWhereTheyMay) {
  EXPECT_EQ(choose_cuda_device({1, 1}, 3, 4, true), 0);
  EXPECT_EQ(choose_cuda_device({2, 2}, 3, 4, true), 1);
  EXPECT_EQ(error_of([] { choose_cuda_device({2, 8}, 3, 4, false); }),
            "this host has 2 CUDA devices for 4 ranks: expected one for each rank, or comm.backend "
            "\"staged\", over "
            "which ranks can share a device");
}

TEST(CudaChoice, WithoutADeviceThereIsNoChoice) {
  for (const bool may_share : {false, true})
    EXPECT_EQ(error_of([&] { choose_cuda_device({0, 0}, 0, 1, may_share); }),
              "this host has no usable CUDA device (no driver, or CUDA_VISIBLE_DEVICES hides them)");
}

}  // namespace
}  // namespace tessera::comm

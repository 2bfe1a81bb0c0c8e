// join(): its decisions before it connects.
#include "comm/init/init.h"

#include <gtest/gtest.h>

#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using testing::error_of;

TEST(ChooseDevice, RefusesUnknownBackendsAndThoseForOtherTensors) {
  JoinOptions options;
  options.backend = "mpi";
  EXPECT_EQ(
      error_of([&] { join(options, Environment{}); }),
      "unknown backend \"mpi\": expected \"auto\", \"shm\", \"hybrid\", \"gloo\", \"nccl\" or \"staged\"");
  for (const std::string backend : {"nccl", "staged"}) {
    options.backend = backend;
    EXPECT_EQ(
        error_of([&] { join(options, Environment{}); }),
        "backend \"" + backend + "\" moves CUDA tensors; CPU tensors need \"shm\", \"hybrid\" or \"gloo\"");
  }
  options.backend = "gloo";
  options.device = "cuda";
  EXPECT_EQ(error_of([&] { join(options, Environment{}); }),
            "backend \"gloo\" moves CPU tensors; CUDA tensors need \"nccl\" or \"staged\"");
}

}  // namespace
}  // namespace tessera::comm

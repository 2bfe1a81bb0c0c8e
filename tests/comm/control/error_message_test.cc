#include "comm/control/error_message.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <stdexcept>

namespace tessera::comm {
namespace {

TEST(ErrorMessage, OneLineWithoutBackTracesAndPlaces) {
  try {
    TORCH_CHECK(false, "sizes differ: ", 3, " and ", 4, "\nmore");
  } catch (const std::exception& error) {
    EXPECT_EQ(error_message(error), "sizes differ: 3 and 4");
    EXPECT_EQ(error_message(std::current_exception()), "sizes differ: 3 and 4");
  }
  EXPECT_EQ(error_message(std::runtime_error("[enforce fail at alloc.cpp:127] can't allocate memory")),
            "can't allocate memory");
}

// As torch/csrc/jit/runtime/jit_exception.h words it.
TEST(ErrorMessage, WhatAnOperatorSaidBehindTorchScriptsTraceback) {
  EXPECT_EQ(error_message(std::runtime_error(
                "The following operation failed in the TorchScript interpreter.\nTraceback "
                "of TorchScript (most recent call last):\n"
                "  File \"m.py\", line 3, in forward\n    return self.fc(x)\nRuntimeError: "
                "mat1 and mat2 shapes cannot be multiplied\n")),
            "mat1 and mat2 shapes cannot be multiplied");
  EXPECT_EQ(error_message(std::runtime_error("TypeError: not TorchScript's")),
            "TypeError: not TorchScript's");
}

}  // namespace
}  // namespace tessera::comm

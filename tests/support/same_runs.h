// GoogleTest's expectations of two training runs.
#pragma once

#include <gtest/gtest.h>

#include "tests/support/parity.h"

namespace tessera::testing {

/// Within rounding: sums over ranks have another order than the plain loop's over the batch.
inline void expect_close(const TrainingRun& run, const TrainingRun& plain, bool weights = true) {
  constexpr double kTolerance = 1e-5;
  ASSERT_EQ(run.losses.size(), plain.losses.size());
  for (size_t step = 0; step < plain.losses.size(); ++step) {
    EXPECT_NEAR(run.losses[step], plain.losses[step], kTolerance) << "step " << step;
    EXPECT_NEAR(run.norms[step], plain.norms[step], kTolerance * (1 + plain.norms[step])) << "step " << step;
    EXPECT_LT(largest_difference(run.gradients[step], plain.gradients[step]), kTolerance) << "step " << step;
  }
  if (weights) {
    EXPECT_LT(largest_difference(run.weights, plain.weights), kTolerance);
  }
}

inline void expect_same_bits(const TrainingRun& a, const TrainingRun& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  for (size_t step = 0; step < a.gradients.size(); ++step)
    EXPECT_TRUE(bit_equal(a.gradients[step], b.gradients[step])) << "step " << step;
  EXPECT_TRUE(bit_equal(a.weights, b.weights));
}

}  // namespace tessera::testing

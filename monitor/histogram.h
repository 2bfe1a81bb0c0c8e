// Histogram: a distribution of values in TensorBoard's buckets.
#pragma once

#include <span>
#include <vector>

namespace tessera {

/// TensorBoard's HistogramProto. Bucket i counts values from bucket_limit[i - 1] up to bucket_limit[i], which
/// is excluded. The limits are those of TensorFlow and of torch.utils.tensorboard: 0 and 1e-12 times the
/// powers of 1.1 up to 1e20, with both signs; neighbouring empty buckets are merged.
struct Histogram {
  double min = 0, max = 0, num = 0, sum = 0, sum_squares = 0;
  std::vector<double> bucket_limit;
  std::vector<double> bucket;
};

/// Builds a Histogram from values that come in parts, in any order. A value.
struct HistogramCounts {
  HistogramCounts();

  /// Adds `values` that are finite.
  void add(std::span<const float> values);
  /// Without values, num is 0 and there are no buckets.
  Histogram histogram() const;

  double min, max;  ///< +inf and -inf without values
  double num = 0, sum = 0, sum_squares = 0;
  std::vector<double> counts;  ///< of all possible buckets
};

}  // namespace tessera

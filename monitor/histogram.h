// Histogram: how values are distributed, in TensorBoard's buckets.
#pragma once

#include <span>
#include <vector>

namespace tessera {

/// What TensorBoard's HistogramProto holds. Bucket i counts values from bucket_limit[i - 1] up to, but
/// without, bucket_limit[i]. The limits are those of TensorFlow and of torch.utils.tensorboard: 0 and 1e-12
/// times the powers of 1.1 up to 1e20, with both signs; neighbouring buckets without values are one.
struct Histogram {
  double min = 0, max = 0, num = 0, sum = 0, sum_squares = 0;
  std::vector<double> bucket_limit;
  std::vector<double> bucket;
};

/// Counts of every bucket there is, and what else a Histogram is made of: for values that
/// come in parts, in any order. A value.
struct HistogramCounts {
  HistogramCounts();

  /// Local. The finite ones of `values`.
  void add(std::span<const float> values);
  /// Local. Without any values, num is 0 and there are no buckets.
  Histogram histogram() const;

  double min, max;  ///< +inf and -inf without values
  double num = 0, sum = 0, sum_squares = 0;
  std::vector<double> counts;  ///< always equally many
};

/// Local. Of the finite ones of `values`.
Histogram make_histogram(std::span<const float> values);

}  // namespace tessera

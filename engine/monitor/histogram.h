// Histogram: how values are distributed, in TensorBoard's buckets.
#pragma once

#include <span>
#include <vector>

namespace tessera {

/// What TensorBoard's HistogramProto holds. Bucket i counts values from bucket_limit[i - 1] up to, but without, bucket_limit[i]. The limits
/// are those of TensorFlow and of torch.utils.tensorboard: 0 and 1e-12 times the powers of 1.1 up to 1e20, with both signs;
/// neighbouring buckets without values are one.
struct Histogram {
  double min = 0, max = 0, num = 0, sum = 0, sum_squares = 0;
  std::vector<double> bucket_limit;
  std::vector<double> bucket;
};

/// Local. Of the finite ones of `values`; without any, num is 0 and there are no buckets.
Histogram make_histogram(std::span<const float> values);

}  // namespace tessera

#include "engine/monitor/histogram.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera {
namespace {

std::vector<double> make_limits() {
  std::vector<double> positive;
  for (double limit = 1e-12; limit < 1e20; limit *= 1.1) positive.push_back(limit);
  positive.push_back(std::numeric_limits<double>::max());
  std::vector<double> limits(positive.rbegin(), positive.rend());
  for (double& limit : limits) limit = -limit;
  limits.push_back(0);
  limits.insert(limits.end(), positive.begin(), positive.end());
  return limits;
}

}  // namespace

Histogram make_histogram(std::span<const float> values) {
  static const std::vector<double> limits = make_limits();
  std::vector<double> counts(limits.size(), 0.0);
  Histogram histogram;
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    ++counts[static_cast<size_t>(std::upper_bound(limits.begin(), limits.end(), value) - limits.begin())];
    histogram.min = histogram.num == 0 ? value : std::min(histogram.min, value);
    histogram.max = histogram.num == 0 ? value : std::max(histogram.max, value);
    ++histogram.num;
    histogram.sum += value;
    histogram.sum_squares += value * value;
  }
  if (histogram.num == 0) return histogram;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0 && i + 1 < counts.size() && counts[i + 1] == 0) continue;
    histogram.bucket_limit.push_back(limits[i]);
    histogram.bucket.push_back(counts[i]);
  }
  return histogram;
}

}  // namespace tessera

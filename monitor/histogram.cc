#include "monitor/histogram.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

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

const std::vector<double>& limits() {
  static const std::vector<double> all = make_limits();
  return all;
}

/// Where the buckets of all floats with the same sign and exponent begin and end, by these nine
/// bits: eight or so remain to be searched.
using Parts = std::array<std::pair<size_t, size_t>, 512>;

size_t bits_of(float value) { return std::bit_cast<uint32_t>(value) >> 23; }

size_t search(double value, std::pair<size_t, size_t> part) {
  const auto begin = limits().begin();
  return static_cast<size_t>(std::upper_bound(begin + static_cast<ptrdiff_t>(part.first),
                                              begin + static_cast<ptrdiff_t>(part.second), value) -
                             begin);
}

Parts make_parts() {
  Parts parts;
  for (uint32_t bits = 0; bits < parts.size(); ++bits) {
    const auto [low, high] =
        std::minmax({std::bit_cast<float>(bits << 23), std::bit_cast<float>(bits << 23 | 0x7fffffu)});
    if (std::isfinite(low) && std::isfinite(high))
      parts[bits] = {search(low, {0, limits().size()}), search(high, {0, limits().size()})};
  }
  return parts;
}

}  // namespace

HistogramCounts::HistogramCounts()
    : min(std::numeric_limits<double>::infinity()),
      max(-std::numeric_limits<double>::infinity()),
      counts(limits().size(), 0.0) {}

void HistogramCounts::add(std::span<const float> values) {
  static const Parts parts = make_parts();
  for (const float single : values) {
    if (!std::isfinite(single)) continue;
    const double value = single;
    ++counts[search(value, parts[bits_of(single)])];
    min = std::min(min, value);
    max = std::max(max, value);
    ++num;
    sum += value;
    sum_squares += value * value;
  }
}

Histogram HistogramCounts::histogram() const {
  Histogram histogram;
  if (num == 0) return histogram;
  histogram.min = min;
  histogram.max = max;
  histogram.num = num;
  histogram.sum = sum;
  histogram.sum_squares = sum_squares;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0 && i + 1 < counts.size() && counts[i + 1] == 0) continue;
    histogram.bucket_limit.push_back(limits()[i]);
    histogram.bucket.push_back(counts[i]);
  }
  return histogram;
}

}  // namespace tessera

// How far two hosts' clocks are apart, from messages between them. Pure.
#pragma once

#include <vector>

namespace tessera::tools {

struct ClockDifference {
  double seconds = 0;  ///< the other clock less ours
  double error = 0;    ///< by which that is wrong at most
};

// [Note: clocks] As NTP does (RFC 5905, section 8): the other host sends at t0, we receive at t1 and answer
// at t2, it receives at t3. Its clock is ahead by ((t0 - t1) + (t3 - t2)) / 2, wrong by at most half of the
// time on the way. The fastest of several counts.

/// `there`: t0, t3 of each exchange by the other clock; `here`: t1, t2 by ours. As many, at least one
/// exchange.
ClockDifference clock_difference(const std::vector<double>& there, const std::vector<double>& here);

}  // namespace tessera::tools

// Made-up messages between two clocks.
#include "tools/doctor/doctor_clock.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace tessera::tools {
namespace {

/// Exchanges with a clock that is `ahead`, by their times on the way there and back; we answer after 5 ms.
ClockDifference after(double ahead, const std::vector<std::pair<double, double>>& ways) {
  std::vector<double> there, here;
  double now = 1e9;  // seconds since 1970, as the clocks have it
  for (const auto& [to_us, back] : ways) {
    there.push_back(now + ahead);
    here.push_back(now + to_us);
    here.push_back(now + to_us + 0.005);
    there.push_back(now + to_us + 0.005 + back + ahead);
    now += 1;
  }
  return clock_difference(there, here);
}

TEST(DoctorClock, IsExactWhereBothWaysAreAlike) {
  for (const double ahead : {-3.0, 0.0, 2.5}) {
    const ClockDifference found = after(ahead, {{0.001, 0.001}});
    EXPECT_NEAR(found.seconds, ahead, 1e-6);
    EXPECT_NEAR(found.error, 0.001, 1e-6);
  }
}

TEST(DoctorClock, IsWrongByNoMoreThanItSays) {
  const ClockDifference found = after(2.5, {{0.04, 0.0}});
  EXPECT_NEAR(std::abs(found.seconds - 2.5), 0.02, 1e-6);
  EXPECT_NEAR(found.error, 0.02, 1e-6);
}

TEST(DoctorClock, FastestExchangeCounts) {
  const ClockDifference found = after(-0.25, {{0.3, 0.01}, {0.0002, 0.0002}, {0.05, 0.2}});
  EXPECT_NEAR(found.seconds, -0.25, 1e-6);
  EXPECT_NEAR(found.error, 0.0002, 1e-6);
}

}  // namespace
}  // namespace tessera::tools

#include "tools/doctor/doctor_clock.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace tessera::tools {

ClockDifference clock_difference(const std::vector<double>& there, const std::vector<double>& here) {
  ClockDifference best{0, std::numeric_limits<double>::infinity()};
  for (size_t i = 0; i + 1 < std::min(there.size(), here.size()); i += 2) {
    const double on_the_way = (there[i + 1] - there[i]) - (here[i + 1] - here[i]);
    if (on_the_way / 2 < best.error)
      best = {((there[i] - here[i]) + (there[i + 1] - here[i + 1])) / 2, std::max(0.0, on_the_way / 2)};
  }
  return best;
}

}  // namespace tessera::tools

// What the summing passes return; parts of one whole add up.
#pragma once

#include <cstdint>

namespace tessera::kernels {

struct NormPart {
  double sum_of_squares = 0;  ///< of the finite elements
  int64_t num_nonfinite = 0;
};

/// LAMB's sums over one parameter's elements, or over a part of them.
struct LambPart {
  double weight_sq = 0;
  double update_sq = 0;
};

}  // namespace tessera::kernels

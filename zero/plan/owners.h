// The owner of each parameter: the rank that updates it as a whole, where an optimizer needs more than an
// element's own weight, gradient and states (zero/optimizer/whole_optimizer.h). Pure arithmetic.
#pragma once

#include <vector>

#include "zero/plan/layout.h"

namespace tessera::zero {

/// Returns the rank that owns each parameter; -1: it is not trainable. The largest parameters are given out
/// first, each to the rank that has the fewest elements by then, so that ranks are even where no parameter is
/// larger than the others together.
std::vector<int> owners_of(const Layout& layout);

}  // namespace tessera::zero

// The owner of each parameter: the rank that computes its update as a whole, where an optimizer needs more
// than an element's own weight, gradient and states. Pure arithmetic.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::zero {

/// `costs`: by parameter, in any unit; below 0: it has no owner. Returns the rank that owns each parameter;
/// -1: none does. The costliest are given out first, each to the rank that has the least by then, so that
/// ranks are even where no parameter costs more than the others together.
std::vector<int> owners_of(const std::vector<int64_t>& costs, int world_size);

}  // namespace tessera::zero

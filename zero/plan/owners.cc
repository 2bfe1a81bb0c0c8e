#include "zero/plan/owners.h"

#include <algorithm>
#include <cstdint>

namespace tessera::zero {

std::vector<int> owners_of(const Layout& layout) {
  std::vector<int> owners(static_cast<size_t>(layout.num_parameters()), -1), largest_first;
  for (int parameter = 0; parameter < layout.num_parameters(); ++parameter)
    if (layout.parameters()[parameter].trainable) largest_first.push_back(parameter);
  std::stable_sort(largest_first.begin(), largest_first.end(),
                   [&](int a, int b) { return layout.slice(a).numel > layout.slice(b).numel; });
  std::vector<int64_t> numel_of(static_cast<size_t>(layout.world_size()), 0);
  for (const int parameter : largest_first) {
    const auto fewest = std::min_element(numel_of.begin(), numel_of.end());
    owners[parameter] = static_cast<int>(fewest - numel_of.begin());
    *fewest += layout.slice(parameter).numel;
  }
  return owners;
}

}  // namespace tessera::zero

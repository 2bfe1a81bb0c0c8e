#include "zero/plan/owners.h"

#include <algorithm>

namespace tessera::zero {

std::vector<int> owners_of(const std::vector<int64_t>& costs, int world_size) {
  std::vector<int> owners(costs.size(), -1), costliest_first;
  for (size_t parameter = 0; parameter < costs.size(); ++parameter)
    if (costs[parameter] >= 0) costliest_first.push_back(static_cast<int>(parameter));
  std::stable_sort(costliest_first.begin(), costliest_first.end(),
                   [&](int a, int b) { return costs[a] > costs[b]; });
  std::vector<int64_t> of_rank(static_cast<size_t>(world_size), 0);
  for (const int parameter : costliest_first) {
    const auto least = std::min_element(of_rank.begin(), of_rank.end());
    owners[parameter] = static_cast<int>(least - of_rank.begin());
    *least += costs[parameter];
  }
  return owners;
}

}  // namespace tessera::zero

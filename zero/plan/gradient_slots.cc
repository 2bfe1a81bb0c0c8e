#include "zero/plan/gradient_slots.h"

#include <algorithm>
#include <numeric>

namespace tessera::zero {

int64_t gradient_buffer_numel(const std::vector<int64_t>& numels, int num_slots) {
  const auto num_units = static_cast<int64_t>(numels.size());
  const int64_t sum = std::accumulate(numels.begin(), numels.end(), int64_t{0});
  const int64_t largest = *std::max_element(numels.begin(), numels.end());
  const int64_t few = std::min<int64_t>(num_slots, num_units) * sum / num_units;
  return std::max(largest, few);
}

std::vector<GradientSlot> arrange_slots(const std::vector<int64_t>& numels, int64_t buffer_numel) {
  std::vector<GradientSlot> slots;
  int64_t end = 0;
  for (const int64_t numel : numels) {
    GradientSlot slot{end + numel <= buffer_numel ? end : 0, numel, static_cast<int>(slots.size()) - 1};
    end = slot.offset + numel;
    const auto overlaps = [&](const GradientSlot& before) {
      return before.offset < end && slot.offset < before.offset + before.numel;
    };
    while (slot.last_overlapping >= 0 && !overlaps(slots[slot.last_overlapping])) --slot.last_overlapping;
    slots.push_back(slot);
  }
  return slots;
}

}  // namespace tessera::zero

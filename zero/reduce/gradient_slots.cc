#include "zero/reduce/gradient_slots.h"

#include <algorithm>
#include <numeric>

namespace tessera::zero {

at::Tensor symmetric_zeros(comm::Communicator& comm, int64_t numel, const at::TensorOptions& like,
                           const std::string& label) {
  const int64_t bytes = numel * static_cast<int64_t>(like.dtype().itemsize());
  return comm.allocate_symmetric(bytes, like.device(), label).view(like.dtype().toScalarType()).zero_();
}

int64_t GradientSlots::total_numel(const std::vector<int64_t>& numels, int num_slots) {
  const auto num_units = static_cast<int64_t>(numels.size());
  const int64_t sum = std::accumulate(numels.begin(), numels.end(), int64_t{0});
  const int64_t largest = *std::max_element(numels.begin(), numels.end());
  const int64_t few = std::min<int64_t>(num_slots, num_units) * sum / num_units;
  return std::max(largest, few);
}

GradientSlots::GradientSlots(comm::Communicator& comm, const std::vector<int64_t>& numels, int num_slots,
                             const at::TensorOptions& like)
    : buffer_(symmetric_zeros(comm, total_numel(numels, num_slots), like, "gradient buffer")) {
  arrange(numels);
}

void GradientSlots::arrange(const std::vector<int64_t>& numels) {
  slots_.clear();
  int64_t end = 0;
  for (const int64_t numel : numels) {
    Slot slot{end + numel <= buffer_.numel() ? end : 0, numel, static_cast<int>(slots_.size()) - 1};
    end = slot.offset + numel;
    const auto overlaps = [&](const Slot& before) {
      return before.offset < end && slot.offset < before.offset + before.numel;
    };
    while (slot.last_overlapping >= 0 && !overlaps(slots_[slot.last_overlapping])) --slot.last_overlapping;
    slots_.push_back(slot);
  }
}

}  // namespace tessera::zero

#include "zero/gather/compiled_graphs.h"

#include <algorithm>

namespace tessera::zero {

void CompiledGraphs::add(const at::RecordFunction& function, UnitHandle* unit) {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<UnitHandle>>& units =
      units_[{function.seqNr(), at::RecordFunction::currentThreadId()}];
  const bool is_known =
      std::any_of(units.begin(), units.end(), [&](const auto& one) { return one.get() == unit; });
  if (!is_known) units.push_back(unit->shared_from_this());
  if (units_.size() > kMostGraphs) units_.erase(units_.begin());
}

std::vector<UnitHandle*> CompiledGraphs::read_by_forward_of(const at::RecordFunction& backward) const {
  const std::lock_guard lock(mutex_);
  std::vector<UnitHandle*> units;
  const auto found = units_.find({backward.seqNr(), backward.forwardThreadId()});
  if (found == units_.end()) return units;
  for (const auto& unit : found->second)
    if (unit->residency != nullptr) units.push_back(unit.get());
  return units;
}

void CompiledGraphs::erase(const at::RecordFunction& backward) {
  const std::lock_guard lock(mutex_);
  units_.erase({backward.seqNr(), backward.forwardThreadId()});
}

void CompiledGraphs::forget_the_gone() {
  const std::lock_guard lock(mutex_);
  std::erase_if(units_, [](const auto& graph) {
    return std::any_of(graph.second.begin(), graph.second.end(),
                       [](const auto& unit) { return unit->residency == nullptr; });
  });
}

}  // namespace tessera::zero

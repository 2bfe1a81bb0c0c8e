#include "zero/plan/access_order.h"

#include <algorithm>
#include <utility>

namespace tessera::zero {

/// How far ahead of its place a use is looked for: more is taken for one that the step does not have.
static constexpr size_t kLookAhead = 256;
/// Uses that change places do so among neighbours. What is farther behind the others has been left out.
static constexpr size_t kLate = 16;
/// A step that does not end, as one of an evaluation that nobody announced, is learnt up to here.
static constexpr size_t kMaxLearnt = size_t{1} << 20;

bool AccessOrder::Sequence::take(int tensor) {
  const size_t end = std::min(uses.size(), begin + kLookAhead);
  size_t found = begin;
  while (found < end && (taken[found] || uses[found].tensor != tensor)) ++found;
  if (found >= end) return false;
  taken[found] = true;
  farthest = std::max(farthest, found + 1);
  while (begin < farthest && (taken[begin] || begin + kLate < farthest)) ++begin;
  return true;
}

void AccessOrder::begin_step() {
  detour_ = Sequence();
  step_ = Sequence(std::exchange(learnt_, {}));
}

void AccessOrder::expect(std::vector<int> tensors) {
  std::vector<Use> uses;
  uses.reserve(tensors.size());
  for (const int tensor : tensors) uses.push_back({.tensor = tensor});
  detour_ = Sequence(std::move(uses));
}

void AccessOrder::used(Use use) {
  if (detour_.take(use.tensor)) return;
  if (step_.take(use.tensor)) detour_ = Sequence();
  if (learnt_.size() < kMaxLearnt) learnt_.push_back(use);
}

}  // namespace tessera::zero

// AccessOrder: in which order a step of training uses tensors, learnt from the step before it. Steps repeat:
// so what comes next is what came next the last time. A prediction that is wrong costs time alone, so nothing
// is agreed on: uses that are left out, changed in order or new are passed over, and the next step has
// learnt.
#pragma once

#include <cstddef>
#include <vector>

namespace tessera::zero {

/// Predicts which tensors a step uses next. Not thread-safe. Plain bookkeeping.
class AccessOrder {
 public:
  struct Use {
    int tensor = 0;
    bool overwrite = false;  ///< what it held before is not read
    bool operator==(const Use&) const = default;
  };

  /// A step begins: its uses are predicted to be those since the last call.
  void begin_step();
  /// Uses outside of the step's order come next, as of an evaluation or a checkpoint. They are not learnt.
  /// What is left of them is forgotten when the step goes on.
  void expect(std::vector<int> tensors);
  void used(Use use);

  /// Calls `function(Use)` for the uses that are predicted, soonest first, until it returns false or a
  /// whole step has been passed through.
  template <class Function>
  void for_each_next(const Function& function) const {
    if (!detour_.for_each(detour_.begin, detour_.uses.size(), function)) return;
    if (step_.for_each(step_.begin, step_.uses.size(), function)) step_.for_each_again(step_.begin, function);
  }

 private:
  struct Sequence {
    std::vector<Use> uses;
    std::vector<bool> taken;
    size_t begin = 0;     // all before are past
    size_t farthest = 0;  // behind the last one taken

    explicit Sequence(std::vector<Use> all = {}) : uses(std::move(all)), taken(uses.size(), false) {}
    bool take(int tensor);
    template <class Function>
    bool for_each(size_t from, size_t to, const Function& function) const {
      for (size_t i = from; i < to; ++i)
        if (!taken[i] && !function(uses[i])) return false;
      return true;
    }
    template <class Function>
    void for_each_again(size_t to, const Function& function) const {
      for (size_t i = 0; i < to; ++i)
        if (!function(uses[i])) return;
    }
  };

  Sequence step_, detour_;
  std::vector<Use> learnt_;
};

}  // namespace tessera::zero

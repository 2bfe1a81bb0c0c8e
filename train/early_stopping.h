// EarlyStopping: whether a run has stopped getting better. As
// transformers.EarlyStoppingCallback, whose names these are.
#pragma once

#include <cstdint>
#include <optional>

namespace tessera::train {

/// What a run that goes on has to know.
struct EarlyStoppingState {
  std::optional<double> best;  ///< none yet
  int64_t num_stale = 0;       ///< evaluations since it last got better by more than the threshold
  bool operator==(const EarlyStoppingState&) const = default;
};

/// A value: counts the evaluations in a row that were no better than the best by more than `threshold`.
class EarlyStopping {
 public:
  /// `patience`: of these evaluations, after which training ends; 0: never.
  EarlyStopping(int64_t patience, double threshold, bool greater_is_better)
      : patience_(patience), threshold_(threshold), sign_(greater_is_better ? 1 : -1) {}

  bool enabled() const { return patience_ > 0; }
  /// Local. The metric's value at the next evaluation; one that is no number is not better.
  void note(double value);
  bool should_stop() const { return enabled() && state_.num_stale >= patience_; }
  const EarlyStoppingState& state() const { return state_; }
  /// Local. Continues from a checkpoint.
  void set_state(const EarlyStoppingState& state) { state_ = state; }

 private:
  int64_t patience_;
  double threshold_;
  double sign_;
  EarlyStoppingState state_;
};

}  // namespace tessera::train

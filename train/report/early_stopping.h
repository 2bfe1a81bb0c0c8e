// EarlyStopping: ends training when a metric no longer improves. Follows transformers.EarlyStoppingCallback,
// and uses its names.
#pragma once

#include <cstdint>
#include <optional>

namespace tessera::train {

/// What a checkpoint stores.
struct EarlyStoppingState {
  std::optional<double> best;  ///< unset before the first finite value
  int64_t num_stale = 0;       ///< evaluations since the last improvement by more than the threshold
  bool operator==(const EarlyStoppingState&) const = default;
};

/// Counts the consecutive evaluations that did not improve on the best value by more than `threshold`. A
/// value type, not thread-safe.
class EarlyStopping {
 public:
  /// `patience`: the number of such evaluations after which training ends; 0: never.
  EarlyStopping(int64_t patience, double threshold, bool greater_is_better)
      : patience_(patience), threshold_(threshold), sign_(greater_is_better ? 1 : -1) {}

  bool enabled() const { return patience_ > 0; }
  /// Adds the metric's value at the next evaluation. NaN is never an improvement.
  void update(double value);
  bool should_stop() const { return enabled() && state_.num_stale >= patience_; }
  const EarlyStoppingState& state() const { return state_; }
  /// Restores the state from a checkpoint.
  void set_state(const EarlyStoppingState& state) { state_ = state; }

 private:
  int64_t patience_;
  double threshold_;
  double sign_;
  EarlyStoppingState state_;
};

}  // namespace tessera::train

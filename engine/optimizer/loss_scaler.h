// LossScaler: the factor the loss is multiplied with in fp16 training, so that small gradients do not vanish.
// Follows DeepSpeed's DynamicLossScaler and LossScaler (deepspeed/runtime/fp16/loss_scaler.py): the scale
// halves after `hysteresis` overflows and doubles after every `loss_scale_window` steps without one.
#pragma once

#include <cstdint>

#include "engine/config/config.h"

namespace tessera {

/// Decides the loss scale of fp16 training. Not thread-safe. Every rank has one and calls it with equal
/// arguments, so that all stay equal without communication.
class LossScaler {
 public:
  /// Saved in checkpoints; names as DeepSpeed's cur_scale, cur_iter, last_overflow_iter, cur_hysteresis.
  struct State {
    double scale = 1;
    int64_t num_updates = 0;
    int64_t last_overflow = -1;  ///< the update that overflowed last; -1: none
    int64_t hysteresis = 1;      ///< overflows left before the scale is lowered, that one included
    bool operator==(const State&) const = default;
  };

  /// The scale is always 1 where nothing is computed in fp16, always fp16.loss_scale where that is
  /// above 0, and otherwise dynamic, beginning with 2^initial_scale_power, or with fp16.min_loss_scale if
  /// that is more (DeepSpeed begins below it, and an overflow raises the scale). `config`: as validated() has
  /// checked it.
  explicit LossScaler(const EngineConfig& config);

  double scale() const { return state_.scale; }

  /// Called after every optimizer step. `overflow`: some rank's gradients were not finite, and the
  /// step was skipped. Throws tessera::Error when the scale would have to go below fp16.min_loss_scale.
  void update(bool overflow);

  const State& state() const { return state_; }
  /// Continues from a checkpoint. A static scale keeps the configured value. A dynamic one begins anew where
  /// no updates were counted: before the first one, and in a run that had none.
  void set_state(const State& state);

 private:
  Fp16Config config_;
  bool dynamic_ = false;
  State state_;
  State first_;  ///< of a dynamic scale
};

}  // namespace tessera

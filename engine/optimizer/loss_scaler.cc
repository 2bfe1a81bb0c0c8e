#include "engine/optimizer/loss_scaler.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/error.h"

namespace tessera {
namespace {

constexpr double kScaleFactor = 2;

}  // namespace

LossScaler::LossScaler(const EngineConfig& engine) : config_(engine.fp16) {
  if (!engine.scales_loss()) return;
  dynamic_ = config_.loss_scale == 0;
  if (!dynamic_) {
    state_.scale = config_.loss_scale;
    return;
  }
  state_.scale = std::max(std::ldexp(1.0, config_.initial_scale_power), config_.min_loss_scale);
  state_.hysteresis = config_.hysteresis;
  first_ = state_;
}

void LossScaler::update(bool overflow) {
  if (!dynamic_) return;
  if (overflow) {
    if (state_.hysteresis > 1) {
      --state_.hysteresis;
    } else {
      if (state_.scale == config_.min_loss_scale)
        throw Error("loss scale is already at its minimum (fp16.min_loss_scale = ", config_.min_loss_scale,
                    ") and gradients are still not finite at update ", state_.num_updates,
                    ": the model itself diverges; expected finite gradients at this scale");
      state_.scale = std::max(state_.scale / kScaleFactor, config_.min_loss_scale);
    }
    state_.last_overflow = state_.num_updates;
  } else {
    if (config_.consecutive_hysteresis) state_.hysteresis = config_.hysteresis;
    // The first step after an overflow does not count towards the window, as in DeepSpeed.
    const int64_t num_stable = state_.num_updates - state_.last_overflow - 1;
    if (num_stable > 0 && num_stable % config_.loss_scale_window == 0) {
      state_.hysteresis = config_.hysteresis;
      state_.scale *= kScaleFactor;
    }
  }
  ++state_.num_updates;
}

void LossScaler::set_state(const State& state) {
  if (!dynamic_) return;
  state_ = state.num_updates == 0 ? first_ : state;
  state_.scale = std::max(state_.scale, config_.min_loss_scale);
}

}  // namespace tessera

#include "train/report/early_stopping.h"

#include <cmath>

namespace tessera::train {

void EarlyStopping::update(double value) {
  const bool is_first = !state_.best && std::isfinite(value);
  const double gain = is_first || !state_.best ? 0 : sign_ * (value - *state_.best);
  state_.num_stale = is_first || gain > threshold_ ? 0 : state_.num_stale + 1;
  if (is_first || gain > 0) state_.best = value;  // false for NaN
}

}  // namespace tessera::train

// NonFiniteWarnings: warns when a training loss or a metric is NaN or infinite, and says where it came from.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "comm/communicator.h"
#include "train/report/evaluate.h"
#include "train/report/step_meter.h"
#include "train/task/sampler.h"
#include "train/task/task.h"

namespace tessera::train {

/// Warns once for each of loss, evaluation and test, and again only after it has been finite in between.
/// Borrows the task and the communicator, which must outlive it. Used by one thread.
class NonFiniteWarnings {
 public:
  using Warn = std::function<void(const std::string& text)>;

  /// `warn`: is given each warning, on every rank.
  NonFiniteWarnings(const Task& task, TrainSampler sampler, comm::Communicator& comm, Warn warn);

  /// A window of steps begins after `steps_done` steps, with the data at `position`.
  void begin_window(int64_t steps_done, const EpochPosition& position);
  /// Collective. The window has ended after `steps_done` steps with these sums, whose loss is equal on every
  /// rank. The warning names the first step, its rank and its samples. Not to be called with loss scaling,
  /// which produces overflows on purpose to find the scale. Throws CommError.
  void check(const StepWindow& window, int64_t steps_done);
  /// The results of an evaluation after `steps_done` steps.
  void check(const Evaluation& evaluation, int64_t steps_done);

 private:
  std::string describe_loss(const StepWindow& window, int64_t steps_done);

  const Task& task_;
  TrainSampler sampler_;
  comm::Communicator& comm_;
  Warn warn_;
  int64_t window_start_ = 0;       // steps done when the window began
  EpochPosition window_position_;  // where the data were then
  bool loss_was_finite_ = true;
  bool evaluation_was_finite_ = true, test_was_finite_ = true;
};

}  // namespace tessera::train

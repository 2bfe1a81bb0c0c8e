// StepMeter: what happened since the last report: the mean loss over all ranks,
// throughput, and where time went.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "comm/communicator.h"

namespace tessera::train {

/// Parts of a training step, timed with wall_clock_breakdown.
enum class Phase { kData, kForward, kBackward, kStep };
inline constexpr size_t kNumPhases = 4;

/// Sums of one window of steps.
struct StepWindow {
  double loss = 0;          ///< mean over samples, of all ranks; not a number when any micro-step's was not
  int64_t num_steps = 0;    ///< optimizer steps
  int64_t num_samples = 0;  ///< of these, over all ranks
  double seconds = 0;       ///< evaluation not counted
  std::optional<int64_t> not_finite;  ///< this rank's first micro-step, from 0, whose loss is not finite
  std::array<double, kNumPhases> phase_ms{};  ///< per optimizer step, of this rank; zero without a breakdown
};

/// Sums of a whole run, which a resumed one goes on with.
struct TrainTotals {
  double loss_sum = 0;      ///< over full micro-steps of all ranks
  double loss_count = 0;    ///< how many these are; a smaller one counts as its part
  double seconds = 0;       ///< evaluation not counted
  int64_t num_samples = 0;  ///< over all ranks, repetitions counted
  TrainTotals& operator+=(const TrainTotals& more) {
    loss_sum += more.loss_sum, loss_count += more.loss_count, seconds += more.seconds,
        num_samples += more.num_samples;
    return *this;
  }
  double mean_loss() const { return loss_count > 0 ? loss_sum / loss_count : 0.0; }
  bool operator==(const TrainTotals&) const = default;
};

/// Owns the running sums; the loss is summed on the device, so that a step
/// never waits for it. Not thread-safe.
class StepMeter {
 public:
  /// `breakdown`: measure phases, which on CUDA costs a synchronisation each.
  /// `before`: what the processes of this run before have counted.
  StepMeter(at::Device device, bool breakdown, const TrainTotals& before = {});

  /// Runs `body`, and times it when there is a breakdown. Returns what it returns.
  template <class Body>
  auto time(Phase phase, Body&& body) {
    if (!breakdown_) return body();
    synchronize();
    const auto start = Clock::now();
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      add_time(phase, start);
    } else {
      auto result = body();
      add_time(phase, start);
      return result;
    }
  }

  /// Local. The mean loss of one micro-step (a scalar), which counts `share` times: what counts of it, as a
  /// part of that of a full one. 0: not at all.
  void add_loss(const at::Tensor& loss, double share = 1);
  /// Local. One optimizer step is done, of so many samples over all ranks.
  void count_step(int64_t num_samples) {
    ++window_.num_steps;
    window_.num_samples += num_samples;
  }
  /// Local. The time from pause() to resume() (an evaluation) is not counted. resume() returns these seconds.
  void pause();
  double resume();

  /// Collective. The window that ends now; a new one begins. Adds it to the totals.
  StepWindow finish_window(comm::Communicator& comm);

  /// Collective. Of all windows, the one under way too.
  TrainTotals totals(comm::Communicator& comm) const;

 private:
  using Clock = std::chrono::steady_clock;
  void synchronize() const;
  void add_time(Phase phase, Clock::time_point start);
  TrainTotals under_way(comm::Communicator& comm) const;

  at::Device device_;
  bool breakdown_;
  StepWindow window_;
  at::Tensor loss_sum_;  // (3) fp64 on the device: sum of losses, how many full micro-steps that is,
                         // micro-steps before the first loss that is not finite
  Clock::time_point window_start_;
  std::optional<Clock::time_point> pause_start_;  // while paused
  TrainTotals totals_;                            // of the windows that have ended
};

}  // namespace tessera::train

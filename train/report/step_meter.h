// StepMeter: measures the steps since the last report: the mean loss over all ranks, the throughput, and the
// time of each phase.
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

/// Results for one window of steps.
struct StepWindow {
  double loss = 0;        ///< mean over the samples of all ranks; not finite if that of any micro-step is not
  int64_t num_steps = 0;  ///< optimizer steps
  int64_t num_samples = 0;            ///< of these steps, over all ranks
  double seconds = 0;                 ///< without pauses
  std::optional<int64_t> not_finite;  ///< this rank's first micro-step, from 0, whose loss is not finite
  std::array<double, kNumPhases> phase_ms{};  ///< per optimizer step, of this rank; 0 without a breakdown
};

/// Sums over a whole run, stored in checkpoints so that a resumed run adds to them.
struct TrainTotals {
  double loss_sum = 0;      ///< over the micro-steps of all ranks
  double loss_count = 0;    ///< number of micro-steps; a smaller one counts as a fraction
  double seconds = 0;       ///< without pauses
  int64_t num_samples = 0;  ///< over all ranks, each repetition counted
  TrainTotals& operator+=(const TrainTotals& more) {
    loss_sum += more.loss_sum, loss_count += more.loss_count, seconds += more.seconds,
        num_samples += more.num_samples;
    return *this;
  }
  double mean_loss() const { return loss_count > 0 ? loss_sum / loss_count : 0.0; }
  bool operator==(const TrainTotals&) const = default;
};

/// Adds up loss and time of steps. Owns the running sums. The loss is summed on the device, so that a step
/// does not wait for it. Not thread-safe.
class StepMeter {
 public:
  /// `breakdown`: measure phases, which on CUDA synchronizes the device for each. `before`: the totals of the
  /// run's earlier processes.
  StepMeter(at::Device device, bool breakdown, const TrainTotals& before = {});

  /// Runs `body`, timing it if there is a breakdown. Returns what it returns.
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

  /// Adds the mean loss of one micro-step (a scalar) with weight `share`: its samples' weight as a
  /// fraction of that of a full micro-step. 0: the loss is not counted.
  void add_loss(const at::Tensor& loss, double share = 1);
  /// Counts one optimizer step, with its samples over all ranks.
  void count_step(int64_t num_samples) {
    ++window_.num_steps;
    window_.num_samples += num_samples;
  }
  /// The time from pause() to resume(), such as an evaluation, is not counted. resume() returns it in
  /// seconds.
  void pause();
  double resume();

  /// Collective. Ends the window, adds it to the totals and begins a new one.
  StepWindow finish_window(comm::Communicator& comm);

  /// Collective. The totals of all windows, the current one included.
  TrainTotals totals(comm::Communicator& comm) const;

 private:
  using Clock = std::chrono::steady_clock;
  void synchronize() const;
  void add_time(Phase phase, Clock::time_point start);
  TrainTotals window_sums(comm::Communicator& comm) const;

  at::Device device_;
  bool breakdown_;
  StepWindow window_;
  at::Tensor loss_sum_;  // (3) fp64 on the device: sum of losses, sum of their shares, number of micro-steps
                         // before the first loss that is not finite
  Clock::time_point window_start_;
  std::optional<Clock::time_point> pause_start_;  // while paused
  TrainTotals totals_;                            // of the finished windows
};

}  // namespace tessera::train

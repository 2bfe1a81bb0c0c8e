#include "train/report/step_meter.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace tessera::train {
namespace {

double seconds_between(std::chrono::steady_clock::time_point start,
                       std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

}  // namespace

StepMeter::StepMeter(at::Device device, bool breakdown, const TrainTotals& before)
    : device_(device),
      breakdown_(breakdown),
      loss_sum_(at::zeros({3}, at::TensorOptions(at::kDouble).device(device))),
      window_start_(Clock::now()),
      totals_(before) {}

void StepMeter::synchronize() const {
  if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
}

void StepMeter::add_time(Phase phase, Clock::time_point start) {
  synchronize();
  window_.phase_ms[static_cast<size_t>(phase)] += 1e3 * seconds_between(start, Clock::now());
}

void StepMeter::add_loss(const at::Tensor& loss, double share) {
  at::Tensor sum = loss_sum_[0];
  if (share != 0) {
    sum.add_(loss.detach().to(at::kDouble), share);
    loss_sum_[1].add_(share);
  }
  loss_sum_[2].add_(sum.sub(sum).eq(0));  // 1 while the sum is finite, 0 from the first loss on that is not
}

void StepMeter::pause() { pause_start_ = Clock::now(); }

double StepMeter::resume() {
  const auto now = Clock::now();
  const double paused_s = seconds_between(pause_start_.value(), now);
  window_start_ += now - *pause_start_;
  pause_start_.reset();
  return paused_s;
}

TrainTotals StepMeter::window_sums(comm::Communicator& comm) const {
  at::Tensor sums = loss_sum_.clone();
  comm.all_reduce(sums, "training loss")->wait();
  sums = sums.cpu();
  return {.loss_sum = sums[0].item<double>(),
          .loss_count = sums[1].item<double>(),
          .seconds = seconds_between(window_start_, pause_start_.value_or(Clock::now())),
          .num_samples = window_.num_samples};
}

TrainTotals StepMeter::totals(comm::Communicator& comm) const {
  TrainTotals totals = totals_;
  totals += window_sums(comm);
  return totals;
}

StepWindow StepMeter::finish_window(comm::Communicator& comm) {
  const TrainTotals ended = window_sums(comm);
  totals_ += ended;
  StepWindow window = std::exchange(window_, {});
  window.loss = ended.mean_loss();
  if (!std::isfinite(window.loss)) {
    const at::Tensor mine = loss_sum_.cpu();
    if (!std::isfinite(mine[0].item<double>()))
      window.not_finite = static_cast<int64_t>(mine[2].item<double>());
  }
  window.seconds = ended.seconds;
  for (double& ms : window.phase_ms) ms /= static_cast<double>(std::max<int64_t>(1, window.num_steps));
  window_start_ = Clock::now();
  loss_sum_.zero_();
  return window;
}

}  // namespace tessera::train

#include "train/step_meter.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace tessera::train {
namespace {

double seconds_between(std::chrono::steady_clock::time_point start, std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

}  // namespace

StepMeter::StepMeter(at::Device device, bool breakdown)
    : device_(device),
      breakdown_(breakdown),
      loss_sum_(at::zeros({2}, at::TensorOptions(at::kDouble).device(device))),
      window_start_(Clock::now()) {}

void StepMeter::synchronize() const {
  if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
}

void StepMeter::add_time(Phase phase, Clock::time_point start) {
  synchronize();
  window_.phase_ms[static_cast<size_t>(phase)] += 1e3 * seconds_between(start, Clock::now());
}

void StepMeter::add_loss(const at::Tensor& loss, double share) {
  if (share == 0) return;
  loss_sum_[0].add_(loss.detach().to(at::kDouble), share);
  loss_sum_[1].add_(share);
}

void StepMeter::pause() { pause_start_ = Clock::now(); }

double StepMeter::resume() {
  const auto now = Clock::now();
  window_start_ += now - pause_start_;
  return seconds_between(pause_start_, now);
}

StepWindow StepMeter::finish_window(comm::Communicator& comm) {
  comm.all_reduce(loss_sum_, "training loss")->wait();
  const at::Tensor sums = loss_sum_.cpu();
  const double loss_sum = sums[0].item<double>();
  const double count = sums[1].item<double>();

  StepWindow window = window_;
  window.loss = count > 0 ? loss_sum / count : 0.0;
  for (double& ms : window.phase_ms) ms /= static_cast<double>(std::max<int64_t>(1, window.num_steps));
  const auto now = Clock::now();
  window.seconds = seconds_between(window_start_, now);

  total_loss_sum_ += loss_sum;
  total_count_ += count;
  total_s_ += window.seconds;
  window_ = {};
  window_start_ = now;
  loss_sum_.zero_();
  return window;
}

}  // namespace tessera::train

#include "train/report/non_finite_warnings.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "core/str.h"
#include "train/data/train_loader.h"

namespace tessera::train {
namespace {

std::string nan_or_number(double value) { return std::isnan(value) ? "nan" : str(value); }

}  // namespace

NonFiniteWarnings::NonFiniteWarnings(const Task& task, TrainSampler sampler, comm::Communicator& comm,
                                     Warn warn)
    : task_(task), sampler_(std::move(sampler)), comm_(comm), warn_(std::move(warn)) {}

void NonFiniteWarnings::begin_window(int64_t steps_done, const EpochPosition& position) {
  window_start_ = steps_done;
  window_position_ = position;
}

void NonFiniteWarnings::check(const StepWindow& window, int64_t steps_done) {
  const bool finite = std::isfinite(window.loss);
  if (!finite && loss_was_finite_) warn_(describe_loss(window, steps_done));
  loss_was_finite_ = finite;
}

/// Collective.
std::string NonFiniteWarnings::describe_loss(const StepWindow& window, int64_t steps_done) {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  const std::vector<int64_t> micro_steps =
      comm_.exchange(window.not_finite.value_or(kNone), "micro-step of a loss that is not finite");
  const auto first = std::min_element(micro_steps.begin(), micro_steps.end());
  const std::string loss = nan_or_number(window.loss);
  if (*first == kNone)  // each rank's loss is finite, and only their sum is not
    return str("the training loss is ", loss, " at step ", steps_done);
  const auto rank = static_cast<size_t>(first - micro_steps.begin());
  std::string samples;
  if (static_cast<size_t>(comm_.rank()) == rank) {
    TrainPlan plan(sampler_, window_position_);
    TrainPlan::MicroStep micro_step = plan.next();
    for (int64_t i = 0; i < *first; ++i) micro_step = plan.next();
    samples = describe_samples(task_, micro_step);
  }
  samples = comm_.exchange(samples, "samples of a loss that is not finite")[rank];
  return str("the training loss is ", loss, " at step ",
             window_start_ + *first / sampler_.shape().accumulation_steps + 1, " on rank ", rank, ", ",
             samples);
}

void NonFiniteWarnings::check(const Evaluation& evaluation, int64_t steps_done) {
  std::vector<std::string> parts;
  for (const auto& [name, value] : evaluation.metrics)
    if (!std::isfinite(value))
      parts.push_back(str("the ", evaluation.name(), " ", name, " is ", nan_or_number(value)));
  bool& was_finite = evaluation.of == EvaluationSet::kTest ? test_was_finite_ : evaluation_was_finite_;
  if (!parts.empty() && was_finite)
    warn_(str(join(parts, ", "), " at step ", steps_done, ": the model's outputs for the ", evaluation.set,
              " data, or these data, hold values that are not finite"));
  was_finite = parts.empty();
}

}  // namespace tessera::train

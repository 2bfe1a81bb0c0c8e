#include "train/data/train_loader.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/str.h"

namespace tessera::train {

TrainSampler train_sampler(const RunConfig& run, const Task& task, int world_size, int rank) {
  const BatchShape shape{run.engine.train_micro_batch_size_per_gpu, run.engine.gradient_accumulation_steps,
                         world_size, rank};
  TrainOrder order = task.train_order();
  order.drop_last = run.trainer.dataloader_drop_last;
  return TrainSampler(task.train_size(), shape, static_cast<uint64_t>(run.engine.seed), std::move(order));
}

// ------------------------------------------------------------------------------------------- the plan

TrainPlan::TrainPlan(TrainSampler sampler, const EpochPosition& start)
    : sampler_(std::move(sampler)), position_(start) {
  sampler_.set_epoch(start.epoch);
}

TrainPlan::MicroStep TrainPlan::next() {
  int64_t& first = position_.samples_into_epoch;
  if (micro_step_ == 0 && sampler_.step_size(first) == 0) {
    sampler_.set_epoch(++position_.epoch);
    first = 0;
  }
  const BatchShape& shape = sampler_.shape();
  MicroStep next{.slice = sampler_.slice(first, micro_step_),
                 .seed = augmentation_seed(sampler_.seed(), position_.epoch, first, micro_step_, shape.rank),
                 .step_size = sampler_.step_size(first),
                 .ends_step = false,
                 .position_after = {}};
  if (++micro_step_ == shape.accumulation_steps) {
    micro_step_ = 0;
    first += next.step_size;
    next.ends_step = true;
    next.position_after = position_;
  }
  return next;
}

namespace {

Batch make_batch(const Task& task, const std::vector<int64_t>& indices, uint64_t seed) {
  return task.train_batch(indices, at::make_generator<at::CPUGeneratorImpl>(seed));
}

/// "samples 7, 123 and 10 more"
std::string list_samples(const std::vector<int64_t>& samples) {
  constexpr size_t kMost = 8;
  const std::vector<int64_t> first(
      samples.begin(), samples.begin() + static_cast<std::ptrdiff_t>(std::min(samples.size(), kMost)));
  return str(samples.size() == 1 ? "sample " : "samples ", join(first, ", "),
             samples.size() > kMost ? str(" and ", samples.size() - kMost, " more") : std::string());
}

/// The indices of the samples with a value that is not finite.
std::vector<int64_t> broken_samples(const Batch& batch, const std::vector<int64_t>& indices) {
  at::Tensor finite = at::ones({static_cast<int64_t>(indices.size())}, at::kBool);
  std::vector<at::Tensor> tensors = batch.inputs;
  tensors.push_back(batch.target);
  for (const at::Tensor& tensor : tensors)
    if (tensor.defined() && tensor.is_floating_point() && tensor.dim() > 0 &&
        tensor.size(0) == finite.size(0))
      finite.logical_and_(tensor.reshape({tensor.size(0), -1}).isfinite().all(1));
  std::vector<int64_t> broken;
  for (size_t row = 0; row < indices.size(); ++row)
    if (!finite[static_cast<int64_t>(row)].item<bool>()) broken.push_back(indices[row]);
  return broken;
}

}  // namespace

std::string describe_samples(const Task& task, const TrainPlan::MicroStep& micro_step) {
  const std::vector<int64_t>& indices = micro_step.slice.indices;
  const std::string all = str("of ", list_samples(indices), " of the training data: ");
  try {
    const std::vector<int64_t> broken = broken_samples(make_batch(task, indices, micro_step.seed), indices);
    if (broken.empty()) return all + "what they hold is finite, so the learning rate may be too high";
    return str(all, list_samples(broken), broken.size() == 1 ? " holds" : " hold",
               " a value that is not finite");
  } catch (const std::exception&) {
    return all + "the learning rate may be too high, or they hold values that are not finite";
  }
}

// ------------------------------------------------------------------------------------------ the loader

TrainLoader::TrainLoader(const Task& task, TrainSampler sampler, const EpochPosition& start,
                         int64_t num_steps, const DataLoaderOptions& options)
    : task_(task),
      plan_(std::move(sampler), start),
      position_(start),
      steps_left_(num_steps),
      loader_(options, [this] { return plan(); }) {}

TrainBatch TrainLoader::next() {
  std::optional<Batch> batch = loader_.next();
  TESSERA_CHECK(batch, "a batch after the last step");
  const TrainPlan::MicroStep planned = std::move(ahead_.front());
  ahead_.pop_front();
  if (planned.ends_step) position_ = planned.position_after;
  return {*std::move(batch), planned.slice.weight, planned.step_size};
}

DataLoader::Make TrainLoader::plan() {
  if (steps_left_ == 0) return {};
  TrainPlan::MicroStep next = plan_.next();
  if (next.ends_step) --steps_left_;
  ahead_.push_back(std::move(next));
  return [this, indices = std::exchange(ahead_.back().slice.indices, {}), seed = ahead_.back().seed] {
    return make_batch(task_, indices, seed);
  };
}

}  // namespace tessera::train

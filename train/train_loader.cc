#include "train/train_loader.h"

#include <ATen/CPUGeneratorImpl.h>

#include <utility>

#include "core/check.h"

namespace tessera::train {

TrainSampler train_sampler(const RunConfig& run, const Task& task, int world_size, int rank) {
  const BatchShape shape{run.engine.train_micro_batch_size_per_gpu, run.engine.gradient_accumulation_steps, world_size, rank};
  TrainOrder order = task.train_order();
  order.drop_last = run.trainer.dataloader_drop_last;
  return TrainSampler(task.train_size(), shape, static_cast<uint64_t>(run.engine.seed), std::move(order));
}

TrainLoader::TrainLoader(const Task& task, TrainSampler sampler, const EpochPosition& start, int64_t num_steps,
                         const DataLoaderOptions& options)
    : task_(task),
      sampler_(std::move(sampler)),
      position_(start),
      planned_(start),
      steps_left_(num_steps),
      loader_(options, [this] { return plan(); }) {
  sampler_.set_epoch(start.epoch);
}

TrainBatch TrainLoader::next() {
  std::optional<Batch> batch = loader_.next();
  TESSERA_CHECK(batch, "a batch behind the last step");
  const Planned planned = std::move(ahead_.front());
  ahead_.pop_front();
  if (planned.ends_step) position_ = planned.behind;
  TrainBatch result = planned.outline;
  result.batch = *std::move(batch);
  return result;
}

DataLoader::Make TrainLoader::plan() {
  if (steps_left_ == 0) return {};
  int64_t& first = planned_.samples_into_epoch;
  if (micro_step_ == 0 && sampler_.step_size(first) == 0) {
    sampler_.set_epoch(++planned_.epoch);
    first = 0;
  }
  TrainSlice slice = sampler_.slice(first, micro_step_);
  const BatchShape& shape = sampler_.shape();
  const uint64_t seed = augmentation_seed(sampler_.seed(), planned_.epoch, first, micro_step_, shape.rank);
  Planned planned;
  planned.outline = {.batch = {}, .weight = slice.weight, .step_size = sampler_.step_size(first)};
  if (++micro_step_ == shape.accumulation_steps) {
    micro_step_ = 0;
    --steps_left_;
    first += planned.outline.step_size;
    planned.ends_step = true;
    planned.behind = planned_;
  }
  ahead_.push_back(std::move(planned));
  return [this, indices = std::move(slice.indices), seed] {
    return task_.train_batch(indices, at::make_generator<at::CPUGeneratorImpl>(seed));
  };
}

}  // namespace tessera::train

#include "train/report/evaluate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>

#include "core/check.h"
#include "core/str.h"
#include "train/data/data_loader.h"
#include "train/task/sampler.h"

namespace tessera::train {
namespace {

/// (B) bool: true for samples, false for padding.
at::Tensor mask_of(const EvalBatch& batch) {
  return at::arange(static_cast<int64_t>(batch.indices.size()), at::kLong).lt(batch.num_valid);
}

/// The batches of this rank, in order.
DataLoader::Plan batches(const Task& task, const EvalSampler& sampler, bool is_test) {
  return [&task, sampler, is_test, next = int64_t{0}]() mutable -> DataLoader::Make {
    if (next == sampler.num_batches()) return {};
    return [&task, is_test, part = sampler.batch(next++)] {
      Batch batch = is_test ? task.test_batch(part.indices) : task.eval_batch(part.indices);
      batch.mask = mask_of(part);
      return batch;
    };
  };
}

}  // namespace

std::optional<double> Evaluation::find(const std::string& name) const {
  for (const auto& [metric, value] : metrics)
    if (metric == name) return value;
  return std::nullopt;
}

Evaluation evaluate(Task& task, Engine& engine, const TrainerConfig& trainer, const Display& display,
                    EvaluationSet set, int64_t max_samples) {
  const auto start = std::chrono::steady_clock::now();
  const bool is_test = set == EvaluationSet::kTest;
  const int64_t size = std::min(is_test ? task.test_size() : task.eval_size(), max_samples);
  // A batch is filled up to its size: one larger than this rank's share of the data would be padding.
  const int64_t share = (size + engine.world_size() - 1) / engine.world_size();
  const int64_t batch_size = std::clamp<int64_t>(share, 1, trainer.eval_batch_size);
  const EvalSampler sampler(size, batch_size, engine.world_size(), engine.rank());
  ProgressBar bar(display,
                  {.description = "evaluate",
                   .total = sampler.num_batches(),
                   .unit = "samples",
                   .units_per_item = static_cast<double>(batch_size * engine.world_size())},
                  /*keep=*/false);

  DataLoader loader(data_loader_options(trainer, engine.device()), batches(task, sampler, is_test));
  engine.eval();
  at::Tensor total;
  int64_t num_done = 0;
  while (const std::optional<Batch> batch = loader.next()) {
    const at::NoGradGuard no_grad;
    const at::Tensor sums = task.statistics(*batch);
    total = total.defined() ? total + sums : sums;
    bar.update(++num_done);
  }

  engine.comm().all_reduce(total, "evaluation statistics")->wait();
  total = total.cpu();
  Evaluation result;
  result.num_samples = total[0].item<int64_t>();
  TESSERA_CHECK(result.num_samples == size, task.name(), " counted ", result.num_samples, " samples of ",
                size);
  result.metrics = task.metrics(total);
  const std::vector<std::string> declared = task.metric_names();
  TESSERA_CHECK(std::equal(declared.begin(), declared.end(), result.metrics.begin(), result.metrics.end(),
                           [](const std::string& name, const auto& metric) { return name == metric.first; }),
                task.name(), ": metrics() are not those of metric_names(), ", join(declared, ", "));
  result.of = set;
  result.set = is_test ? "test" : task.eval_set_name();
  result.report = task.report(total);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace tessera::train

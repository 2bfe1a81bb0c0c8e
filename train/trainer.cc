#include "train/trainer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "core/check.h"
#include "core/files/disk.h"
#include "core/memory/allocation_failure.h"
#include "core/str.h"

namespace tessera::train {
namespace {

/// "60,000 training and 10,000 test"
std::string describe_sizes(const Task& task) {
  const std::string training = format_count(task.train_size()) + " training";
  if (task.test_size() == 0)
    return str(training, " and ", format_count(task.eval_size()), " ", task.eval_set_name());
  return str(training, ", ", format_count(task.eval_size()), " validation and ",
             format_count(task.test_size()), " test");
}

/// In fp32 for a low-precision loss, as the engine's loss scaling does.
at::Tensor weighted(const at::Tensor& loss, double weight) {
  if (weight == 1) return loss;
  return (at::isReducedFloatingType(loss.scalar_type()) ? loss.to(at::kFloat) : loss) * weight;
}

}  // namespace

Summary Trainer::run() {
  TESSERA_CHECK(!bar_, "run() was called before");
  try {
    return train();
  } catch (const CheckpointError& error) {
    throw CheckpointError(str(error.what(), "; ", checkpoints_->resume_hint()));
  } catch (const DiskError& error) {
    throw DiskError(str(error.what(), "; ", checkpoints_->resume_hint()));
  }
}

Summary Trainer::train() {
  print_header();
  if (was_finished_) return report_finished();
  prepare_loop();
  while (steps_done_ < total_steps_ && !stopped_early() && !engine_->should_stop()) {
    if (start_.stop && start_.stop()) engine_->request_stop();
    explain_out_of_memory({.when = str("in step ", steps_done_ + 1),
                           .batch_key = "train_micro_batch_size_per_gpu",
                           .batch = config_.engine.train_micro_batch_size_per_gpu,
                           .trains = true},
                          [this] { train_step(); });
    if (report_due()) report();
    if (histograms_due()) log_histograms();
    if (evaluation_due()) evaluate();
    if (checkpoints_->due(steps_done_, epochs_completed(), total_steps_)) save();
    if (checkpoints_->due_in_memory(steps_done_)) save_in_memory();
    bar_->update(steps_done_);
  }
  bar_->close();
  return finish();
}

void Trainer::print_header() {
  output_.logger.debug(str("resolved configuration: ", dump_resolved(config_)));
  if (output_.display.out == nullptr) return;
  const EngineConfig& engine = config_.engine;
  print_line(output_.display,
             str(task_.name(), ": ", describe_sizes(task_), " samples, ", counted(total_steps_, "step"),
                 "\nbatch ", engine.train_batch_size, " = ", engine.train_micro_batch_size_per_gpu, " x ",
                 engine.gradient_accumulation_steps, " accumulated x ", comm_->size(),
                 comm_->size() == 1 ? " rank" : " ranks", ", ZeRO stage ", engine.zero.stage, ", ",
                 precision_of(engine), " on ", engine_->device().is_cpu() ? "cpu" : "cuda"));
  if (start_.resume)
    print_line(output_.display, str("resuming after step ", format_count(steps_done_), ", from ",
                                    checkpoints_->resumed_from()));
}

void Trainer::prepare_loop() {
  meter_.emplace(engine_->device(), config_.engine.wall_clock_breakdown, start_position_.totals);
  non_finite_.emplace(task_, *sampler_, *comm_, [this](const std::string& text) {
    bar_->hide();
    output_.logger.warning(text);
  });
  non_finite_->begin_window(steps_done_, start_position_.data);
  bar_ = std::make_unique<ProgressBar>(
      output_.display,
      BarState{.description = "train",
               .total = total_steps_,
               .unit = "samples",
               .units_per_item = static_cast<double>(config_.engine.train_batch_size)},
      /*keep=*/true);
  loader_ = std::make_unique<TrainLoader>(task_, *sampler_, start_position_.data,
                                          std::max<int64_t>(total_steps_ - steps_done_, 0),
                                          data_loader_options(config_.trainer, engine_->device()));
  if (memory_) {
    memory_->set_default_use(MemoryUse::kActivations);
    memory_->reset_peak();
  }
}

void Trainer::train_step() {
  learning_rate_ = engine_->learning_rates().front();
  const EngineConfig& engine = config_.engine;
  int64_t step_size = 0;
  for (int64_t micro_step = 0; micro_step < engine.gradient_accumulation_steps; ++micro_step) {
    const TrainBatch part = meter_->time(Phase::kData, [&] { return loader_->next(); });
    const at::Tensor loss = meter_->time(Phase::kForward, [&] { return task_.loss(part.batch); });
    meter_->time(Phase::kBackward, [&] { engine_->backward(weighted(loss, part.weight)); });
    meter_->time(Phase::kStep, [&] { engine_->step(); });
    meter_->add_loss(loss, part.weight * static_cast<double>(part.step_size) /
                               static_cast<double>(engine.train_batch_size));
    step_size = part.step_size;
  }
  meter_->count_step(step_size);
  ++steps_done_;
}

/// Collective. A failure is a warning, since the next save may succeed.
void Trainer::save() {
  bar_->hide();
  meter_->pause();
  if (checkpoints_->save(position(), /*must_succeed=*/false)) write_state();
  bar_->exclude_time(meter_->resume());
}

/// Collective.
void Trainer::save_in_memory() {
  meter_->pause();
  checkpoints_->save_in_memory(position());
  bar_->exclude_time(meter_->resume());
}

/// Collective.
Position Trainer::position() {
  return {steps_done_, loader_->position(), meter_->totals(*comm_), early_stopping_.state(), digest_};
}

/// Runs `body`. An allocator's error is thrown as one that says what memory was used for and what to change.
void Trainer::explain_out_of_memory(const MemoryDemand& demand, const std::function<void()>& body) {
  take_allocation_failure();  // an earlier one, which was dealt with
  try {
    body();
  } catch (const std::exception& error) {
    if (is_out_of_memory(error)) fail_for_memory(error, demand, {config_.engine, *comm_, memory_, engine_});
    throw;
  }
}

MemoryDemand Trainer::evaluation_demand(const char* when) const {
  return {.when = when, .batch_key = "trainer.eval_batch_size", .batch = config_.trainer.eval_batch_size};
}

/// The number of epochs done if the last step ended an epoch, else 0. Not computed from steps_done_: the
/// batch size may have changed when the run was resumed.
int64_t Trainer::epochs_completed() const {
  const EpochPosition& at = loader_->position();
  return sampler_->step_size(at.samples_into_epoch) == 0 ? at.epoch + 1 : 0;
}

double Trainer::epochs_done() const {
  const EpochPosition& position = loader_ ? loader_->position() : start_position_.data;
  return static_cast<double>(position.epoch) + static_cast<double>(position.samples_into_epoch) /
                                                   static_cast<double>(sampler_->samples_per_epoch());
}

}  // namespace tessera::train

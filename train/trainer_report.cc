// What the Trainer reports and evaluates between steps.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/str.h"
#include "train/report/histograms.h"
#include "train/run/run_length.h"
#include "train/trainer.h"

namespace tessera::train {

bool Trainer::report_due() const { return is_due(steps_done_, config_.engine.steps_per_print); }

bool Trainer::evaluation_due() const {
  const TrainerConfig& trainer = config_.trainer;
  if (task_.eval_size() == 0) return false;
  if (steps_done_ == total_steps_) return true;
  return is_due(steps_done_, trainer.eval_every_steps) ||
         is_due(epochs_completed(), trainer.eval_every_epochs);
}

bool Trainer::histograms_due() const {
  const MonitorConfig& monitors = config_.engine.monitors;
  return is_due(steps_done_, config_.trainer.histograms_every_steps) &&
         (monitors.tensorboard.enabled || monitors.jsonl.enabled);  // the others cannot store histograms
}

void Trainer::report() {
  const StepWindow window = finish_window();
  StepReport report;
  report.step = steps_done_;
  report.total_steps = total_steps_;
  report.epoch = epochs_done();
  report.loss = window.loss;
  report.learning_rate = learning_rate_;
  report.gradient_norm = engine_->gradient_norm();
  report.samples_per_s = static_cast<double>(window.num_samples) / window.seconds;
  report.world_size = comm_->size();
  if (const auto& flops = engine_->flops()) {
    const double peak = config_.engine.flops_profiler.peak_tflops;
    report.tflops = static_cast<double>(flops->total() * window.num_steps) / window.seconds / 1e12;
    if (peak > 0) report.mfu = *report.tflops / peak;
  }
  report.skipped_steps = engine_->skipped_steps();
  if (config_.engine.scales_loss()) report.loss_scale = engine_->loss_scale();
  if (config_.engine.wall_clock_breakdown) report.phase_ms = window.phase_ms;
  if (memory_) {
    report.memory_peak = memory_->peak();
    memory_->reset_peak();
  }

  record_.log_metrics(to_json(report));
  bar_->set_postfix(format_postfix(report));
  if (!output_.display.is_terminal || report.phase_ms || report.memory_peak) bar_->print(format_line(report));
}

/// Collective.
StepWindow Trainer::finish_window() {
  const StepWindow window = meter_->finish_window(*comm_);
  if (!config_.engine.scales_loss()) non_finite_->check(window, steps_done_);
  non_finite_->begin_window(steps_done_, loader_->position());
  return window;
}

void Trainer::log_histograms() {
  meter_->pause();
  record_.log_histograms(steps_done_, histograms_of(*engine_));
  bar_->exclude_time(meter_->resume());
}

void Trainer::evaluate() {
  bar_->update(steps_done_);
  meter_->pause();
  explain_out_of_memory(evaluation_demand("in evaluation"), [&] {
    last_evaluation_ = train::evaluate(task_, *engine_, config_.trainer, bar_->below());
    write_samples();
    engine_->train();
  });
  bar_->exclude_time(meter_->resume());
  record_.log_metrics(to_json(*last_evaluation_, steps_done_, epochs_done()));
  bar_->print(format_line(*last_evaluation_, epochs_done()));
  non_finite_->check(*last_evaluation_, steps_done_);
  update_early_stopping();
  if (checkpoints_->is_best(*last_evaluation_, steps_done_)) save();
}

void Trainer::update_early_stopping() {
  if (early_stopping_.enabled())
    early_stopping_.update(last_evaluation_->find(config_.trainer.metric_for_best).value());
}

/// Collective. Rank 0 being unable to write samples (DataError) is a warning. Any other error ends the run,
/// since the other ranks would wait for this one.
void Trainer::write_samples(bool is_recorded) {
  try {
    const auto samples =
        task_.write_samples(std::filesystem::path(config_.trainer.output_dir) / kSamplesName, steps_done_);
    if (is_recorded) record_.log_samples(steps_done_, samples);
  } catch (const DataError& error) {
    if (comm_->rank() != 0) throw;
    output_.logger.warning(error.what());
  }
}

void Trainer::write_state() {
  TrainerState state;
  state.global_step = steps_done_;
  state.max_steps = total_steps_;
  state.epoch = epochs_done();
  state.num_train_epochs = config_.trainer.epochs > 0 ? static_cast<double>(config_.trainer.epochs)
                                                      : static_cast<double>(total_steps_) /
                                                            static_cast<double>(sampler_->steps_per_epoch());
  state.logging_steps = config_.engine.steps_per_print;
  state.best = checkpoints_->best();
  state.checkpoints = checkpoints_->folder().string();
  if (early_stopping_.enabled()) state.early_stopping = early_stopping_.state();
  record_.write_state(state);
}

}  // namespace tessera::train

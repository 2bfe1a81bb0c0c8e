// What the Trainer does after the last step: the last checkpoint, the export, the final evaluation, the
// summary.
#include <nlohmann/json.hpp>

#include "core/str.h"
#include "train/trainer.h"

namespace tessera::train {

/// Collective.
Summary Trainer::finish() {
  finish_window();
  const TrainTotals totals = meter_->totals(*comm_);  // before the rest, which is not training time
  const bool interrupted = steps_done_ < total_steps_ && !stopped_early();
  if (!interrupted && task_.eval_size() == 0) {  // otherwise the evaluations have written samples
    explain_out_of_memory({.when = "drawing samples"}, [this] {
      engine_->eval();
      write_samples(/*is_recorded=*/steps_done_ > start_position_.steps_done);
    });
  }
  Summary summary = summary_without_results();
  if (interrupted || checkpoints_->saves()) checkpoints_->save(position(), /*must_succeed=*/true);
  checkpoints_->finish();
  write_state();
  if (interrupted) {
    summary.interrupted = (checkpoints_->folder() / checkpoints_->last_tag()).string();
  } else if (checkpoints_->saves() && config_.trainer.export_model) {
    checkpoints_->export_model(config_.trainer.output_dir);
    describe_model(summary);
  }
  if (!interrupted) evaluate_final_weights(summary);
  summary.num_samples = totals.num_samples;
  summary.train_loss = totals.mean_loss();
  summary.train_s = totals.seconds;
  if (!interrupted) record_.write_results(summary);
  summary.files = record_.files(config_, task_.files());
  bar_->print(format_summary(summary), kSummaryIndent);
  record_.close(interrupted ? RunStatus::kKilled : RunStatus::kFinished);
  return summary;
}

/// Collective. Evaluates the weights that are exported: those of the best checkpoint, or of the last step.
/// The last evaluation during training is used again if it was of the same weights.
void Trainer::evaluate_final_weights(Summary& summary) {
  checkpoints_->load_final_weights();
  bar_->hide();
  const int64_t model_step = checkpoints_->final_is_best() ? checkpoints_->best()->step : steps_done_;
  if (task_.eval_size() > 0)
    summary.evaluation = last_evaluation_ && model_step == steps_done_
                             ? last_evaluation_
                             : evaluate_final_weights(EvaluationSet::kEval);
  if (task_.test_size() > 0) {  // its samples have influenced no decision of the run
    summary.test = evaluate_final_weights(EvaluationSet::kTest);
    record_.log_metrics(to_json(*summary.test, steps_done_, epochs_done()));
  }
  if (summary.evaluation || summary.test) summary.model_step = model_step;
}

Evaluation Trainer::evaluate_final_weights(EvaluationSet set) {
  Evaluation result;
  explain_out_of_memory(evaluation_demand("in the final evaluation"), [&] {
    result = train::evaluate(task_, *engine_, config_.trainer, output_.display, set);
  });
  non_finite_->check(result, steps_done_);
  return result;
}

/// Collective. For --resume of a finished run: its files stay as they are, except that a deleted model is
/// exported again.
Summary Trainer::report_finished() {
  Summary summary = summary_without_results();
  summary.was_finished = true;
  if (checkpoints_->saves() && config_.trainer.export_model) {
    if (!record_.has_model()) checkpoints_->export_model(config_.trainer.output_dir);
    describe_model(summary);
  }
  summary.files = record_.files(config_, task_.files());
  print_line(output_.display, format_summary(summary), kSummaryIndent);
  return summary;
}

Summary Trainer::summary_without_results() const {
  Summary summary;
  summary.task = task_.name();
  summary.num_steps = steps_done_;
  summary.num_epochs = epochs_done();
  summary.skipped_steps = engine_->skipped_steps();
  summary.world_size = comm_->size();
  summary.stage = config_.engine.zero.stage;
  if (stopped_early() && steps_done_ < total_steps_)
    summary.stopped_early = str("no better ", config_.trainer.metric_for_best, " in ",
                                counted(early_stopping_.state().num_stale, "evaluation"));
  summary.folder = config_.trainer.output_dir;
  return summary;
}

void Trainer::describe_model(Summary& summary) const {
  summary.model = kModelName;
  if (const auto& best = checkpoints_->best(); best && checkpoints_->final_is_best())
    summary.model_metric =
        str(config_.trainer.metric_for_best, " ", best->value, " at step ", format_count(best->step));
}

}  // namespace tessera::train

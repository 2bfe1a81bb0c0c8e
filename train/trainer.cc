#include "train/trainer.h"

#include <ATen/ATen.h>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_error.h"
#include "core/check.h"
#include "core/error.h"
#include "core/files/disk.h"
#include "core/memory/allocation_failure.h"
#include "core/str.h"
#include "engine/config/document/suggest.h"
#include "train/report/histograms.h"
#include "train/run/run_directory.h"
#include "train/run/run_length.h"
#include "train/run/same_run.h"

namespace tessera::train {
namespace {

/// The task's options, with the user's appended.
LoadWeightsOptions merge(LoadWeightsOptions options, const LoadWeightsOptions& more) {
  const auto append = [](auto& list, const auto& others) {
    list.insert(list.end(), others.begin(), others.end());
  };
  append(options.ignore_missing, more.ignore_missing);
  append(options.ignore_unexpected, more.ignore_unexpected);
  append(options.ignore_mismatched, more.ignore_mismatched);
  append(options.renamed_prefixes, more.renamed_prefixes);
  options.advice = more.advice;
  return options;
}

/// Whether load_weights() fails unless the file has a parameter of this name: then nobody needs to compute
/// it.
bool must_be_loaded(const std::string& name, const LoadWeightsOptions& options) {
  const auto match = [&](const std::vector<std::string>& patterns) {
    return std::any_of(patterns.begin(), patterns.end(),
                       [&](const std::string& pattern) { return glob_match(pattern, name); });
  };
  return !match(options.ignore_missing) && !match(options.ignore_mismatched);
}

}  // namespace

// ---------------------------------------------------------- from a configuration to an engine that can train

Trainer::Trainer(RunConfig run, Task& task, comm::CommunicatorPtr comm, const InitOptions& init,
                 const TrainerOutput& output, TrainerStart start)
    : config_(std::move(run)),
      task_(task),
      comm_(std::move(comm)),
      output_(comm_->rank() == 0 ? output : TrainerOutput{}),
      start_(std::move(start)),
      record_(*comm_, output_.logger),
      early_stopping_(config_.trainer.early_stopping_patience, config_.trainer.early_stopping_threshold,
                      config_.trainer.greater_is_better()) {
  compare_ranks();
  sampler_.emplace(train_sampler(config_, task_, comm_->size(), comm_->rank()));
  total_steps_ = total_steps(config_.trainer, *sampler_);
  check_evaluation_config();
  if (!config_.engine.managed_gradient_accumulation)
    throw ConfigError(
        "managed_gradient_accumulation: found false, which is for a loop of one's own; expected true "
        "in `tessera train`, whose step() comes after each micro-step");
  const std::string run_id =
      record_.open(config_.trainer, start_.resume, start_.resume && start_.restart_from.sources.empty());
  if (start_.resume) {
    total_steps_ = total_steps(config_.trainer, *sampler_, saved_position());
  } else if (!start_.begin_from.empty()) {
    start_position_ = begun_position(start_.begin_from, start_.begin_tag, *sampler_, *comm_, output_.logger);
    total_steps_ = total_steps(config_.trainer, *sampler_, start_position_);
  }
  resolve_schedule();
  initialize_engine(init);
  checkpoints_.emplace(config_.trainer, *engine_, output_.logger,
                       RunName{.id = run_id, .launched = start_.launched_run}, start_.memory);
  if (start_.resume)
    resume();
  else if (!start_.begin_from.empty())
    begin_elsewhere();
  if (was_finished_) return;
  warn_of_no_effect();
  record_.begin(config_, checkpoints_->run_id(), start_.resume ? std::optional(steps_done_) : std::nullopt,
                task_.files());
}

/// Collective. Of the checkpoint that the run continues from.
std::optional<Position> Trainer::saved_position() {
  const std::vector<RestartFrom::Source>& sources = start_.restart_from.sources;
  const std::filesystem::path on_disk = checkpoints_of(config_.trainer.output_dir);
  if (sources.empty()) return train::saved_position(on_disk, start_.resume_tag, *comm_);
  return train::saved_position(sources.front().in_memory ? start_.memory->path() : on_disk,
                               sources.front().tag, *comm_);
}

/// Collective. Before anything else: a rank with less data than the others could fail alone, and leave them
/// waiting.
void Trainer::compare_ranks() {
  check_same_run(config_, *comm_,
                 {{"--resume", start_.resume},
                  {"--init", !start_.init.empty()},
                  {"--resume with another program's checkpoint", !start_.begin_from.empty()}});
  digest_ = check_same_data(task_, *comm_);
}

/// Is called before training: an unknown metric would otherwise be noticed only after the first evaluation.
void Trainer::check_evaluation_config() const {
  if (task_.eval_size() == 0) {
    if (!early_stopping_.enabled()) return;
    throw ConfigError("trainer.early_stopping_patience: found ", config_.trainer.early_stopping_patience,
                      ", but nothing is evaluated during training; expected 0, or data with an "
                      "evaluation set");
  }
  const std::string& metric = config_.trainer.metric_for_best;
  const std::vector<std::string> known = task_.metric_names();
  if (std::find(known.begin(), known.end(), metric) == known.end())
    throw ConfigError("trainer.metric_for_best: found \"", metric, "\", which no evaluation of ",
                      task_.name(), " has", config::did_you_mean(metric, known), "; expected one of ",
                      join(known, ", "));
}

/// Of what is asked for and does not happen in a run of this length with these settings.
void Trainer::warn_of_no_effect() const {
  const TrainerConfig& trainer = config_.trainer;
  const EngineConfig& engine = config_.engine;
  const auto warn_if = [&](bool is_set, const auto&... text) {
    if (is_set) output_.logger.warning(str(text...));
  };
  for (const auto& [is_on, key, step] :
       {std::tuple(engine.profiler.steps > 0, "profiler.first_step", engine.profiler.first_step),
        {engine.flops_profiler.enabled, "flops_profiler.profile_step", engine.flops_profiler.profile_step}})
    warn_if(is_on && step > total_steps_, key, ": found ", step, ", and the run ends after step ",
            total_steps_, ": no effect");
  warn_if(trainer.histograms_every_steps > 0 && !records_histograms(),
          "trainer.histograms_every_steps: no effect without tensorboard or jsonl_monitor");
}

void Trainer::resolve_schedule() {
  fill_in_schedule(config_.engine.scheduler, total_steps_);
  if (const std::string warning = schedule_warning(config_.engine.scheduler, total_steps_); !warning.empty())
    output_.logger.warning(warning);
}

/// Collective.
void Trainer::initialize_engine(const InitOptions& init) {
  at::manual_seed(static_cast<uint64_t>(config_.engine.seed));
  InitOptions options = init;
  options.log = output_.logger;
  options.caller_reports = true;
  options.steps_per_epoch = sampler_->steps_per_epoch();
  const bool loads = !start_.init.empty() && !start_.resume;
  const LoadWeightsOptions how = merge(task_.init_weights(), start_.init_options);
  const bool is_loaded_next = start_.resume || !start_.begin_from.empty();
  if (is_loaded_next) options.loaded_next = [](const std::string&) { return true; };
  if (loads) options.loaded_next = [how](const std::string& name) { return must_be_loaded(name, how); };
  if (config_.engine.memory_breakdown) memory_.emplace(init.device.type());
  EngineConfig engine = config_.engine;
  if (engine.profiler.path.empty())
    engine.profiler.path = (std::filesystem::path(config_.trainer.output_dir) / "profile").string();
  note_failures_of(init.device);
  explain_out_of_memory({.when = "making the model"},
                        [&] { engine_ = &task_.initialize(engine, comm_, options); });
  if (loads) engine_->load_weights(start_.init, how);
  first_group_ = engine_->learning_rates().size() - 1;
  for (const zero::ParameterSpec& parameter : engine_->sharded_model().layout().parameters())
    if (parameter.trainable) first_group_ = std::min(first_group_, static_cast<size_t>(parameter.group));
  // From here on the ranks' generators differ, so that their dropout differs.
  at::manual_seed(static_cast<uint64_t>(config_.engine.seed + comm_->rank()));
}

/// Collective. The order of an epoch does not depend on the number of ranks or on the batch size, so both may
/// differ from those of the run that is resumed.
void Trainer::resume() {
  start_position_ = start_.restart_from.sources.empty() ? checkpoints_->resume(start_.resume_tag)
                                                        : checkpoints_->resume(start_.restart_from);
  steps_done_ = start_position_.steps_done;
  warn_of_epochs();
  if (const std::string change = describe_change(start_position_.digest, digest_); !change.empty())
    output_.logger.warning(str("the data have changed since the checkpoint: ", change,
                               ". The evaluation may from now on use samples the model was trained on"));
  early_stopping_.set_state(start_position_.early_stopping);
  // A run that was killed after its last checkpoint has no results: it is evaluated and exported now.
  const bool at_end = steps_done_ >= total_steps_ || stopped_early();
  was_finished_ = record_.has_results() && at_end;
  if (at_end && !was_finished_) checkpoints_->check_best();
}

/// Of a schedule by epochs, where these had another number of steps before.
void Trainer::warn_of_epochs() const {
  if (const int64_t epoch = steps_done_ / sampler_->steps_per_epoch();
      counts_epochs(config_.engine.scheduler) && std::abs(epoch - start_position_.data.epoch) > 1)
    output_.logger.warning(
        str("scheduler.params.interval: \"epoch\" counts optimizer steps of the current batch size, which is "
            "not the checkpoint's: the learning rate continues as in epoch ",
            epoch, ", not ", start_position_.data.epoch));
}

/// Collective.
void Trainer::begin_elsewhere() {
  checkpoints_->begin_from(start_.begin_from, start_.begin_tag, start_.allow_partial_load);
  steps_done_ = engine_->global_steps();
  if (steps_done_ != start_position_.steps_done) {  // which the file does not say without the model's names
    start_position_ = position_after(steps_done_, steps_done_ * config_.engine.train_batch_size, *sampler_);
    const int64_t planned =
        std::exchange(total_steps_, total_steps(config_.trainer, *sampler_, start_position_));
    if (planned != total_steps_)
      output_.logger.warning(str("the schedule of the learning rate was made for ", planned,
                                 " steps, and the run ends after ", total_steps_,
                                 ": give its number of steps, or trainer.max_steps"));
  }
  if (steps_done_ >= total_steps_)
    throw ConfigError("trainer.", config_.trainer.max_steps > 0 ? "max_steps" : "epochs",
                      ": the run ends after step ", total_steps_, ", and ", checkpoints_->resumed_from(),
                      " is of step ", steps_done_, "; expected more");
  warn_of_epochs();
}

// -------------------------------------------------------------------------------------------------- the loop

namespace {

/// "60,000 training and 10,000 test"
std::string describe_sizes(const Task& task) {
  const std::string training = format_count(task.train_size()) + " training";
  if (task.test_size() == 0)
    return str(training, " and ", format_count(task.eval_size()), " ", task.eval_set_name());
  return str(training, ", ", format_count(task.eval_size()), " validation and ",
             format_count(task.test_size()), " test");
}

/// Computes in fp32 for a low-precision loss, as the engine's loss scaling does.
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
    throw CheckpointError(error.what(), "; ", checkpoints_->resume_hint());
  } catch (const DiskError& error) {
    throw DiskError(error.what(), "; ", checkpoints_->resume_hint());
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
  if (output_.display.out == nullptr) return;
  const EngineConfig& engine = config_.engine;
  print_line(output_.display,
             str(task_.name(), ": ", describe_sizes(task_), " samples, ", counted(total_steps_, "step"),
                 "\nbatch ", engine.train_batch_size, " = ", engine.train_micro_batch_size_per_gpu, " x ",
                 engine.gradient_accumulation_steps, " accumulated x ", comm_->size(),
                 comm_->size() == 1 ? " rank" : " ranks", ", ZeRO stage ", engine.zero.stage, ", ",
                 precision_of(engine), " on ", engine_->device().is_cpu() ? "cpu" : "cuda"));
  if (!checkpoints_->resumed_from().empty())
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
  learning_rate_ = engine_->learning_rates().at(first_group_);
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

// --------------------------------------------------------------------- reports and evaluations between steps

bool Trainer::report_due() const { return is_due(steps_done_, config_.engine.steps_per_print); }

bool Trainer::evaluation_due() const {
  const TrainerConfig& trainer = config_.trainer;
  if (task_.eval_size() == 0) return false;
  if (steps_done_ == total_steps_) return true;
  return is_due(steps_done_, trainer.eval_every_steps) ||
         is_due(epochs_completed(), trainer.eval_every_epochs);
}

/// The other monitors cannot store histograms.
bool Trainer::records_histograms() const {
  return config_.engine.monitors.tensorboard.enabled || config_.engine.monitors.jsonl.enabled;
}

bool Trainer::histograms_due() const {
  return is_due(steps_done_, config_.trainer.histograms_every_steps) && records_histograms();
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
  bar_->hide();  // the evaluation's bar takes its place
  meter_->pause();
  explain_out_of_memory(evaluation_demand("in evaluation"), [&] {
    last_evaluation_ = train::evaluate(task_, *engine_, config_.trainer, output_.display,
                                       EvaluationSet::kEval, start_.max_eval_samples);
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

// --------------------------------------------------------------------------------------- after the last step

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
    result = train::evaluate(task_, *engine_, config_.trainer, output_.display, set, start_.max_eval_samples);
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

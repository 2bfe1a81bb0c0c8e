#include "train/trainer.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "core/check.h"
#include "core/disk.h"
#include "core/error.h"
#include "core/str.h"
#include "engine/config/suggest.h"
#include "train/data_digest.h"
#include "train/histograms.h"
#include "train/out_of_memory.h"
#include "train/run_length.h"
#include "train/same_run.h"

namespace tessera::train {
namespace {

/// Before anything else: a rank that has fewer data would find out alone.
DataDigest compare_ranks(const RunConfig& run, const TrainerStart& start, const Task& task,
                         comm::Communicator& comm) {
  check_same_run(run, comm, {{"--resume", start.resume}, {"--init", !start.init.empty()}});
  return check_same_data(task, comm);
}

/// "60,000 training and 10,000 test"
std::string describe_sizes(const Task& task) {
  const std::string training = format_count(task.train_size()) + " training";
  if (task.test_size() == 0)
    return str(training, " and ", format_count(task.eval_size()), " ", task.eval_set_name());
  return str(training, ", ", format_count(task.eval_size()), " validation and ",
             format_count(task.test_size()), " test");
}

/// The task's options, and the user's behind them.
LoadWeightsOptions joined(LoadWeightsOptions options, const LoadWeightsOptions& more) {
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

/// A low-precision loss is weighted in fp32, as the engine scales it.
at::Tensor weighted(const at::Tensor& loss, double weight) {
  if (weight == 1) return loss;
  return (at::isReducedFloatingType(loss.scalar_type()) ? loss.to(at::kFloat) : loss) * weight;
}

}  // namespace

template <class Body>
void Trainer::watching_memory(const std::string& when, const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    if (is_out_of_memory(error)) fail_for_memory(error, when, config_.engine, *comm_, memory_);
    throw;
  }
}

Trainer::Trainer(RunConfig run, Task& task, comm::CommunicatorPtr comm, const InitOptions& init,
                 const TrainerOutput& output, TrainerStart start)
    : config_(std::move(run)),
      task_(task),
      comm_(std::move(comm)),
      output_(comm_->rank() == 0 ? output : TrainerOutput{}),
      digest_(compare_ranks(config_, start, task, *comm_)),
      sampler_(train_sampler(config_, task, comm_->size(), comm_->rank())),
      start_(std::move(start)),
      total_steps_(total_steps(config_.trainer, sampler_)),
      record_(*comm_, output_.logger),
      early_stopping_(config_.trainer.early_stopping_patience, config_.trainer.early_stopping_threshold,
                      config_.trainer.greater_is_better()) {
  if (early_stopping_.enabled() && task_.eval_size() == 0)
    throw ConfigError(str("trainer.early_stopping_patience: found ", config_.trainer.early_stopping_patience,
                          ", but nothing is evaluated on the way; expected 0, or data with a part for it"));
  check_metric();
  record_.open(config_.trainer, start_.resume);
  if (start_.resume)
    total_steps_ = total_steps(config_.trainer, sampler_,
                               saved_position(config_.trainer.output_dir, start_.resume_tag, *comm_));
  fill_in_schedule(config_.engine.scheduler, total_steps_);
  if (const std::string warning = schedule_warning(config_.engine.scheduler, total_steps_); !warning.empty())
    output_.logger.warning(warning);
  at::manual_seed(static_cast<uint64_t>(config_.engine.seed));
  InitOptions options = init;
  options.log = output_.logger;
  options.steps_per_epoch = sampler_.steps_per_epoch();
  if (config_.engine.memory_breakdown) memory_.emplace(init.device.type());
  watching_memory("making the model", [&] { engine_ = &task_.initialize(config_.engine, comm_, options); });
  if (!start_.init.empty() && !start_.resume)
    engine_->load_weights(start_.init, joined(task_.init_weights(), start_.init_options));
  // From here on ranks draw different numbers: dropout differs between them.
  at::manual_seed(static_cast<uint64_t>(config_.engine.seed + comm_->rank()));
  checkpoints_.emplace(config_.trainer, *engine_, output_.logger);
  if (start_.resume) resume();
  if (!was_finished_)
    record_.begin(config_, start_.resume ? std::optional(steps_done_) : std::nullopt, task_.files());
}

/// Before anything is trained: the best model would be lost after the first evaluation.
void Trainer::check_metric() const {
  if (task_.eval_size() == 0) return;
  const std::string& metric = config_.trainer.metric_for_best;
  const std::vector<std::string> known = task_.metric_names();
  if (std::find(known.begin(), known.end(), metric) == known.end())
    throw ConfigError(str("trainer.metric_for_best: found \"", metric, "\", which no evaluation of ",
                          task_.name(), " has", config::did_you_mean(metric, known), "; expected one of ",
                          join(known, ", ")));
}

Summary Trainer::run() {
  TESSERA_CHECK(!bar_, "run() was called before");
  try {
    return train();
  } catch (const CheckpointError& error) {
    throw CheckpointError(str(error.what(), "; ", checkpoints_->what_is_safe()));
  } catch (const DiskError& error) {
    throw DiskError(str(error.what(), "; ", checkpoints_->what_is_safe()));
  }
}

Summary Trainer::train() {
  announce();
  if (was_finished_) return report_finished();
  meter_.emplace(engine_->device(), config_.engine.wall_clock_breakdown, start_position_.totals);
  window_start_ = steps_done_;
  window_position_ = start_position_.data;
  bar_ = std::make_unique<ProgressBar>(
      output_.display,
      BarState{.description = "train",
               .total = total_steps_,
               .unit = "samples",
               .units_per_item = static_cast<double>(config_.engine.train_batch_size)},
      /*keep=*/true);
  loader_ = std::make_unique<TrainLoader>(task_, sampler_, start_position_.data,
                                          std::max<int64_t>(total_steps_ - steps_done_, 0),
                                          data_loader_options(config_.trainer, engine_->device()));
  if (memory_) {
    memory_->set_default_use(MemoryUse::kActivations);
    memory_->reset_peak();
  }
  while (steps_done_ < total_steps_ && !stopped_early() && !engine_->should_stop()) {
    if (start_.stop && start_.stop()) engine_->request_stop();
    watching_memory(str("in step ", steps_done_ + 1), [this] { train_step(); });
    if (report_due()) report();
    if (histograms_due()) send_histograms();
    if (evaluation_due()) evaluate();
    if (checkpoints_->due(steps_done_, epochs_ended(), total_steps_)) save();
    bar_->update(steps_done_);
  }
  bar_->close();
  return finish();
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

// ------------------------------------------------------------------------------------- before the loop

// The order of an epoch does not depend on the number of ranks or the batch
// size, so a run can go on with others.
void Trainer::resume() {
  start_position_ = checkpoints_->resume(start_.resume_tag);
  steps_done_ = start_position_.steps_done;
  if (const int64_t epoch = steps_done_ / sampler_.steps_per_epoch();
      counts_epochs(config_.engine.scheduler) && std::abs(epoch - start_position_.data.epoch) > 1)
    output_.logger.warning(
        str("scheduler.params.interval: \"epoch\" counts optimizer steps of this batch size, and it was "
            "another before: the ",
            "learning rate goes on as in epoch ", epoch, ", not ", start_position_.data.epoch));
  if (const std::string change = describe_change(start_position_.digest, digest_); !change.empty())
    output_.logger.warning(str("the data are not those that the run has had so far: ", change,
                               ". What is evaluated from here on may hold samples it was trained on"));
  early_stopping_.set_state(start_position_.early_stopping);
  // A run that was killed after its last checkpoint has no results yet, and
  // still has to evaluate and to export.
  was_finished_ = (steps_done_ >= total_steps_ || stopped_early()) && record_.has_results();
}

/// Collective.
Position Trainer::position() {
  return {steps_done_, loader_->position(), meter_->totals(*comm_), early_stopping_.state(), digest_};
}

void Trainer::announce() {
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
    print_line(output_.display, str("going on after step ", format_count(steps_done_), ", from ",
                                    (checkpoints_->folder() / checkpoints_->last_tag()).string()));
}

// ---------------------------------------------------------------------------------- reports on the way

bool Trainer::report_due() const { return is_due(steps_done_, config_.engine.steps_per_print); }

bool Trainer::evaluation_due() const {
  const TrainerConfig& trainer = config_.trainer;
  if (task_.eval_size() == 0) return false;
  if (steps_done_ == total_steps_) return true;
  return is_due(steps_done_, trainer.eval_every_steps) || is_due(epochs_ended(), trainer.eval_every_epochs);
}

bool Trainer::histograms_due() const {
  const MonitorConfig& monitors = config_.engine.monitors;
  return is_due(steps_done_, config_.trainer.histograms_every_steps) &&
         (monitors.tensorboard.enabled || monitors.jsonl.enabled);  // others have no place for them
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
  report.skipped_steps = engine_->skipped_steps();
  if (config_.engine.scales_loss()) report.loss_scale = engine_->loss_scale();
  if (config_.engine.wall_clock_breakdown) report.phase_ms = window.phase_ms;
  if (memory_) {
    report.memory_peak = memory_->peak();
    memory_->reset_peak();
  }

  record_.numbers(to_json(report));
  bar_->set_postfix(format_postfix(report));
  if (!output_.display.is_terminal || report.phase_ms || report.memory_peak) bar_->print(format_line(report));
}

void Trainer::send_histograms() {
  meter_->pause();
  record_.histograms(steps_done_, histograms_of(*engine_));
  bar_->exclude_time(meter_->resume());
}

/// Collective.
StepWindow Trainer::finish_window() {
  const StepWindow window = meter_->finish_window(*comm_);
  warn_of_loss(window);
  window_start_ = steps_done_;
  window_position_ = loader_->position();
  return window;
}

// With loss scaling an overflow is part of the search for the scale; without, something is wrong.
void Trainer::warn_of_loss(const StepWindow& window) {
  const bool finite = std::isfinite(window.loss);
  if (!finite && loss_was_finite_ && !config_.engine.scales_loss()) {
    const std::string words = describe_loss(window);
    bar_->hide();
    output_.logger.warning(words);
  }
  loss_was_finite_ = finite;
}

/// Collective. Where the window's loss was not finite for the first time: which
/// step, which rank, which samples.
std::string Trainer::describe_loss(const StepWindow& window) {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  const std::vector<int64_t> micro_steps =
      comm_->exchange(window.not_finite.value_or(kNone), "micro-step of a loss that is not finite");
  const auto first = std::min_element(micro_steps.begin(), micro_steps.end());
  const std::string loss = std::isnan(window.loss) ? "nan" : str(window.loss);
  if (*first == kNone)  // each rank's loss is finite, and only their sum is not
    return str("the training loss is ", loss, " at step ", steps_done_);
  const auto rank = static_cast<size_t>(first - micro_steps.begin());
  std::string samples;
  if (static_cast<size_t>(comm_->rank()) == rank) {
    TrainPlan plan(sampler_, window_position_);
    TrainPlan::MicroStep micro_step = plan.next();
    for (int64_t i = 0; i < *first; ++i) micro_step = plan.next();
    samples = describe_samples(task_, micro_step);
  }
  samples = comm_->exchange(samples, "samples of a loss that is not finite")[rank];
  return str("the training loss is ", loss, " at step ",
             window_start_ + *first / config_.engine.gradient_accumulation_steps + 1, " on rank ", rank, ", ",
             samples);
}

/// Once, until one is finite again.
void Trainer::warn_of(const Evaluation& evaluation) {
  std::vector<std::string> parts;
  for (const auto& [name, value] : evaluation.metrics)
    if (!std::isfinite(value))
      parts.push_back(
          str("the ", evaluation.name(), " ", name, " is ", std::isnan(value) ? "nan" : str(value)));
  bool& was_finite = evaluation.of == EvaluationSet::kTest ? test_was_finite_ : evaluation_was_finite_;
  if (!parts.empty() && was_finite) {
    bar_->hide();
    output_.logger.warning(str(join(parts, ", "), " at step ", steps_done_, ": the model's outputs for the ",
                               evaluation.set, " data, or these data, hold values that are not finite"));
  }
  was_finite = parts.empty();
}

void Trainer::evaluate() {
  bar_->update(steps_done_);
  meter_->pause();
  watching_memory(str("in evaluation (trainer.eval_batch_size ", config_.trainer.eval_batch_size, ")"), [&] {
    last_evaluation_ = train::evaluate(task_, *engine_, config_.trainer, bar_->below());
    write_samples();
    engine_->train();
  });
  bar_->exclude_time(meter_->resume());
  record_.numbers(to_json(*last_evaluation_, steps_done_, epochs_done()));
  bar_->print(format_line(*last_evaluation_, epochs_done()));
  warn_of(*last_evaluation_);
  note_for_early_stopping();
  if (checkpoints_->is_best(*last_evaluation_, steps_done_)) save();
}

void Trainer::note_for_early_stopping() {
  if (early_stopping_.enabled())
    early_stopping_.note(last_evaluation_->find(config_.trainer.metric_for_best).value());
}

// Pictures that cannot be written are no reason to end a run. Anything else is,
// since other ranks would wait for this one.
void Trainer::write_samples(bool is_recorded) {
  try {
    const auto samples =
        task_.write_samples(std::filesystem::path(config_.trainer.output_dir) / kSamplesName, steps_done_);
    if (is_recorded) record_.samples(steps_done_, samples);
  } catch (const DataError& error) {
    if (comm_->rank() != 0) throw;
    output_.logger.warning(error.what());
  }
}

/// Of the weights the run ends with, which are those that are exported: what was
/// evaluated on the way was the last step's.
void Trainer::measure(Summary& summary) {
  checkpoints_->load_chosen();
  bar_->hide();
  const int64_t model_step = checkpoints_->ends_with_best() ? checkpoints_->best()->step : steps_done_;
  if (task_.eval_size() > 0)
    summary.evaluation =
        last_evaluation_ && model_step == steps_done_ ? last_evaluation_ : measure(EvaluationSet::kOnTheWay);
  if (task_.test_size() > 0) {  // samples that no decision has seen
    summary.test = measure(EvaluationSet::kTest);
    record_.numbers(to_json(*summary.test, steps_done_, epochs_done()));
  }
  if (summary.evaluation || summary.test) summary.model_step = model_step;
}

Evaluation Trainer::measure(EvaluationSet set) {
  Evaluation result;
  watching_memory(
      str("in the final evaluation (trainer.eval_batch_size ", config_.trainer.eval_batch_size, ")"),
      [&] { result = train::evaluate(task_, *engine_, config_.trainer, output_.display, set); });
  warn_of(result);
  return result;
}

// A failure is a warning: the next one may succeed.
void Trainer::save() {
  bar_->hide();
  meter_->pause();
  if (checkpoints_->save(position(), /*must_succeed=*/false)) write_state();
  bar_->exclude_time(meter_->resume());
}

void Trainer::write_state() {
  TrainerState state;
  state.global_step = steps_done_;
  state.max_steps = total_steps_;
  state.epoch = epochs_done();
  state.num_train_epochs = config_.trainer.epochs > 0 ? static_cast<double>(config_.trainer.epochs)
                                                      : static_cast<double>(total_steps_) /
                                                            static_cast<double>(sampler_.steps_per_epoch());
  state.logging_steps = config_.engine.steps_per_print;
  state.best = checkpoints_->best();
  state.checkpoints = checkpoints_->folder().string();
  if (early_stopping_.enabled()) state.early_stopping = early_stopping_.state();
  record_.state(state);
}

// -------------------------------------------------------------------------------------- after the loop

Summary Trainer::finish() {
  finish_window();
  const TrainTotals totals = meter_->totals(*comm_);  // now: what follows is no training
  const bool interrupted = steps_done_ < total_steps_ && !stopped_early();
  if (!interrupted && task_.eval_size() == 0) {  // else an evaluation does it
    watching_memory("drawing samples", [this] {
      engine_->eval();
      write_samples(/*is_recorded=*/steps_done_ > start_position_.steps_done);
    });
  }
  Summary summary = outline();
  if (interrupted || checkpoints_->saves()) checkpoints_->save(position(), /*must_succeed=*/true);
  checkpoints_->finish();
  write_state();
  if (interrupted) {
    summary.interrupted = (checkpoints_->folder() / checkpoints_->last_tag()).string();
  } else if (checkpoints_->saves() && config_.trainer.export_model) {
    checkpoints_->export_model(config_.trainer.output_dir);
    name_model(summary);
  }
  if (!interrupted) measure(summary);
  summary.num_samples = totals.num_samples;
  summary.train_loss = totals.mean_loss();
  summary.train_s = totals.seconds;
  if (!interrupted) record_.results(summary);
  summary.files = record_.files(config_, task_.files());
  bar_->print(format_summary(summary), kSummaryIndent);
  record_.close(interrupted ? RunStatus::kKilled : RunStatus::kFinished);
  return summary;
}

/// --resume of a run that had come to its end: its files stay as they are, and a model that was taken away is
/// exported again.
Summary Trainer::report_finished() {
  Summary summary = outline();
  summary.was_finished = true;
  if (checkpoints_->saves() && config_.trainer.export_model) {
    if (!record_.has_model()) checkpoints_->export_model(config_.trainer.output_dir);
    name_model(summary);
  }
  summary.files = record_.files(config_, task_.files());
  print_line(output_.display, format_summary(summary), kSummaryIndent);
  return summary;
}

/// What is known of a run without training.
Summary Trainer::outline() const {
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

void Trainer::name_model(Summary& summary) const {
  summary.model = kModelName;
  if (const auto& best = checkpoints_->best(); best && checkpoints_->ends_with_best())
    summary.model_metric =
        str(config_.trainer.metric_for_best, " ", best->value, " at step ", format_count(best->step));
}

/// Where the step before was the last of an epoch, the number of epochs done; else 0. (Steps
/// would not tell after another batch size.)
int64_t Trainer::epochs_ended() const {
  const EpochPosition& at = loader_->position();
  return sampler_.step_size(at.samples_into_epoch) == 0 ? at.epoch + 1 : 0;
}

double Trainer::epochs_done() const {
  const EpochPosition& position = loader_ ? loader_->position() : start_position_.data;
  return static_cast<double>(position.epoch) +
         static_cast<double>(position.samples_into_epoch) / static_cast<double>(sampler_.samples_per_epoch());
}

}  // namespace tessera::train

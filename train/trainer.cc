#include "train/trainer.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.h"
#include "core/error.h"
#include "core/str.h"
#include "train/data_digest.h"
#include "train/histograms.h"
#include "train/out_of_memory.h"
#include "train/run_length.h"

namespace tessera::train {
namespace {

/// After the comparison of the ranks' data: one that has fewer would find out alone.
TrainSampler checked_sampler(const RunConfig& run, const Task& task, comm::Communicator& comm) {
  check_same_data(task, comm);
  return train_sampler(run, task, comm.size(), comm.rank());
}

/// "60,000 training and 10,000 test"
std::string describe_sizes(const Task& task) {
  const std::string training = format_count(task.train_size()) + " training";
  if (task.test_size() == 0) return str(training, " and ", format_count(task.eval_size()), " ", task.eval_set_name());
  return str(training, ", ", format_count(task.eval_size()), " validation and ", format_count(task.test_size()), " test");
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

Trainer::Trainer(RunConfig run, Task& task, comm::CommunicatorPtr comm, const InitOptions& init, const TrainerOutput& output,
                 TrainerStart start)
    : config_(std::move(run)),
      task_(task),
      comm_(std::move(comm)),
      output_(comm_->rank() == 0 ? output : TrainerOutput{}),
      sampler_(checked_sampler(config_, task, *comm_)),
      start_(std::move(start)),
      total_steps_(total_steps(config_.trainer, sampler_, start_.resume ? saved_position(config_.trainer.output_dir, *comm_) : std::nullopt)),
      record_(*comm_, output_.logger),
      early_stopping_(config_.trainer.early_stopping_patience, config_.trainer.early_stopping_threshold, config_.trainer.greater_is_better()) {
  if (early_stopping_.enabled() && task_.eval_size() == 0)
    throw ConfigError(str("trainer.early_stopping_patience: found ", config_.trainer.early_stopping_patience,
                          ", but nothing is evaluated on the way; expected 0, or data with a part for it"));
  fill_in_schedule(config_.engine.scheduler, total_steps_);
  if (const std::string doubt = doubt_about(config_.engine.scheduler, total_steps_); !doubt.empty()) output_.logger.warning(doubt);
  record_.open(config_.trainer, start_.resume);
  at::manual_seed(static_cast<uint64_t>(config_.engine.seed));
  InitOptions options = init;
  options.log = output_.logger;
  options.steps_per_epoch = sampler_.steps_per_epoch();
  if (config_.engine.memory_breakdown) memory_.emplace(init.device.type());
  watching_memory("making the model", [&] { engine_ = &task_.initialize(config_.engine, comm_, options); });
  if (!start_.init.empty() && !start_.resume) engine_->load_weights(start_.init, task_.init_weights());
  // From here on ranks draw different numbers: dropout differs between them.
  at::manual_seed(static_cast<uint64_t>(config_.engine.seed + comm_->rank()));
  checkpoints_.emplace(config_.trainer, *engine_, output_.logger);
  if (start_.resume) go_on_from_checkpoint();
  if (!was_finished_) record_.begin(config_, start_.resume ? std::optional(steps_done_) : std::nullopt, task_.files());
}

Summary Trainer::run() {
  TESSERA_CHECK(!bar_, "run() was called before");
  announce();
  if (was_finished_) return report_finished();
  meter_.emplace(engine_->device(), config_.engine.wall_clock_breakdown, start_position_.totals);
  bar_ = std::make_unique<ProgressBar>(output_.display,
                                       BarState{.description = "train",
                                                .total = total_steps_,
                                                .unit = "samples",
                                                .units_per_item = static_cast<double>(config_.engine.train_batch_size)},
                                       /*keep=*/true);
  loader_ = std::make_unique<TrainLoader>(task_, sampler_, start_position_.data, std::max<int64_t>(total_steps_ - steps_done_, 0),
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
    meter_->add_loss(loss, part.weight * static_cast<double>(part.step_size) / static_cast<double>(engine.train_batch_size));
    step_size = part.step_size;
  }
  meter_->count_step(step_size);
  ++steps_done_;
}

// ------------------------------------------------------------------------------------- before the loop

// The order of an epoch does not depend on the number of ranks or the batch size, so a run can go on with others.
void Trainer::go_on_from_checkpoint() {
  start_position_ = checkpoints_->resume();
  steps_done_ = start_position_.steps_done;
  const auto& words = config_.engine.scheduler.words;
  if (const int64_t epoch = steps_done_ / sampler_.steps_per_epoch();
      words.contains("interval") && words.at("interval") == "epoch" && std::abs(epoch - start_position_.data.epoch) > 1)
    output_.logger.warning(str("scheduler.params.interval: \"epoch\" counts optimizer steps of this batch size, and it was another before: the ",
                               "learning rate goes on as in epoch ", epoch, ", not ", start_position_.data.epoch));
  early_stopping_.set_state(start_position_.early_stopping);
  // A run that was killed after its last checkpoint has no results yet, and still has to evaluate and to export.
  was_finished_ = (steps_done_ >= total_steps_ || stopped_early()) && record_.has_results();
}

/// Collective.
Position Trainer::position() { return {steps_done_, loader_->position(), meter_->totals(*comm_), early_stopping_.state()}; }

void Trainer::announce() {
  output_.logger.debug(str("resolved configuration: ", dump_resolved(config_)));
  if (output_.display.out == nullptr) return;
  const EngineConfig& engine = config_.engine;
  print_line(output_.display, str(task_.name(), ": ", describe_sizes(task_), " samples, ", format_count(total_steps_), " steps\nbatch ", engine.train_batch_size, " = ",
                 engine.train_micro_batch_size_per_gpu, " x ", engine.gradient_accumulation_steps, " accumulated x ",
                 comm_->size(), comm_->size() == 1 ? " rank" : " ranks", ", ZeRO stage ", engine.zero.stage, ", ",
                 precision_of(engine), " on ", engine_->device().is_cpu() ? "cpu" : "cuda"));
  if (start_.resume)
    print_line(output_.display, str("going on after step ", format_count(steps_done_), ", from ", (checkpoints_->folder() / checkpoints_->last_tag()).string()));
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
  return is_due(steps_done_, config_.trainer.histograms_every_steps) && (monitors.tensorboard.enabled || monitors.jsonl.enabled);  // others have no place for them
}

void Trainer::report() {
  const StepWindow window = meter_->finish_window(*comm_);
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

  warn_of_loss(window.loss);
  record_.numbers(to_json(report));
  bar_->set_postfix(format_postfix(report));
  if (!output_.display.is_terminal || report.phase_ms || report.memory_peak) bar_->print(format_line(report));
}

void Trainer::send_histograms() {
  meter_->pause();
  record_.histograms(steps_done_, histograms_of(*engine_));
  bar_->exclude_time(meter_->resume());
}

// With loss scaling an overflow is part of the search for the scale; without, something is wrong.
void Trainer::warn_of_loss(double loss) {
  const bool finite = std::isfinite(loss);
  if (!finite && loss_was_finite_ && !config_.engine.scales_loss()) {
    bar_->hide();
    output_.logger.warning(str("the training loss is ", loss, " at step ", steps_done_,
                               ": the learning rate may be too high, or the data hold values that are not finite"));
  }
  loss_was_finite_ = finite;
}

void Trainer::evaluate(bool is_recorded) {
  bar_->update(steps_done_);
  meter_->pause();
  watching_memory(str("in evaluation (trainer.eval_batch_size ", config_.trainer.eval_batch_size, ")"), [&] {
    last_evaluation_ = train::evaluate(task_, *engine_, config_.trainer, bar_->below());
    write_samples(is_recorded);
    engine_->train();
  });
  bar_->exclude_time(meter_->resume());
  if (is_recorded) record_.numbers(to_json(*last_evaluation_, steps_done_, epochs_done()));
  bar_->print(format_line(*last_evaluation_, epochs_done()));
  if (is_recorded) note_for_early_stopping();
  if (checkpoints_->is_best(*last_evaluation_, steps_done_)) save();
}

void Trainer::note_for_early_stopping() {
  if (!early_stopping_.enabled()) return;
  const std::string& metric = config_.trainer.metric_for_best;
  const std::optional<double> value = last_evaluation_->find(metric);
  if (!value)
    throw ConfigError(str("trainer.metric_for_best: found \"", metric, "\", which no evaluation has; expected one of ",
                          last_evaluation_->metric_names(), " (trainer.early_stopping_patience needs it)"));
  early_stopping_.note(*value);
}

// Pictures that cannot be written are no reason to end a run. Anything else is, since other ranks would wait for this one.
void Trainer::write_samples(bool is_recorded) {
  try {
    const auto samples = task_.write_samples(std::filesystem::path(config_.trainer.output_dir) / kSamplesName, steps_done_);
    if (is_recorded) record_.samples(steps_done_, samples);
  } catch (const DataError& error) {
    if (comm_->rank() != 0) throw;
    output_.logger.warning(error.what());
  }
}

/// On samples that no decision has seen, with the weights that such decisions have chosen.
Evaluation Trainer::test() {
  checkpoints_->load_chosen();
  bar_->hide();
  Evaluation result;
  watching_memory(str("in the final test (trainer.eval_batch_size ", config_.trainer.eval_batch_size, ")"), [&] {
    result = train::evaluate(task_, *engine_, config_.trainer, output_.display, EvaluationSet::kTest);
  });
  record_.numbers(to_json(result, steps_done_, epochs_done()));
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
                                                      : static_cast<double>(total_steps_) / static_cast<double>(sampler_.steps_per_epoch());
  state.logging_steps = config_.engine.steps_per_print;
  state.best = checkpoints_->best();
  state.checkpoints = checkpoints_->folder().string();
  if (early_stopping_.enabled()) state.early_stopping = early_stopping_.state();
  record_.state(state);
}

// -------------------------------------------------------------------------------------- after the loop

Summary Trainer::finish() {
  warn_of_loss(meter_->finish_window(*comm_).loss);
  const TrainTotals totals = meter_->totals(*comm_);  // now: what follows is no training
  const bool interrupted = steps_done_ < total_steps_ && !stopped_early();
  // Killed after the last checkpoint, which the last evaluation's record precedes; its numbers are wanted in the results too.
  if (!interrupted && !last_evaluation_ && task_.eval_size() > 0) evaluate(/*is_recorded=*/false);
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
  if (!interrupted && task_.test_size() > 0) summary.test = test();
  summary.num_samples = totals.num_samples;
  summary.train_loss = totals.mean_loss();
  summary.train_s = totals.seconds;
  summary.evaluation = last_evaluation_;
  if (!interrupted) record_.results(summary);
  bar_->print(format_summary(summary));
  record_.close(interrupted ? RunStatus::kKilled : RunStatus::kFinished);
  return summary;
}

/// --resume of a run that had come to its end: its files stay as they are, and a model that was taken away is exported again.
Summary Trainer::report_finished() {
  Summary summary = outline();
  summary.was_finished = true;
  if (checkpoints_->saves() && config_.trainer.export_model) {
    if (!record_.has_model()) checkpoints_->export_model(config_.trainer.output_dir);
    name_model(summary);
  }
  print_line(output_.display, format_summary(summary));
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
    summary.stopped_early = str("no better ", config_.trainer.metric_for_best, " in ", format_count(early_stopping_.state().num_stale), " evaluations");
  summary.folder = config_.trainer.output_dir;
  return summary;
}

void Trainer::name_model(Summary& summary) const {
  summary.model = kModelName;
  if (const auto& best = checkpoints_->best(); best && checkpoints_->ends_with_best())
    summary.model_metric = str(config_.trainer.metric_for_best, " ", best->value, " at step ", format_count(best->step));
}

/// Where the step before was the last of an epoch, the number of epochs done; else 0. (Steps would not tell after another batch size.)
int64_t Trainer::epochs_ended() const {
  const EpochPosition& at = loader_->position();
  return sampler_.step_size(at.samples_into_epoch) == 0 ? at.epoch + 1 : 0;
}

double Trainer::epochs_done() const {
  const EpochPosition& position = loader_ ? loader_->position() : start_position_.data;
  return static_cast<double>(position.epoch) + static_cast<double>(position.samples_into_epoch) / static_cast<double>(sampler_.samples_per_epoch());
}

}  // namespace tessera::train

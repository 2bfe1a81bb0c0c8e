// The Trainer's constructor: from a configuration to an engine that is ready to train.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/str.h"
#include "engine/config/document/suggest.h"
#include "train/run/run_directory.h"
#include "train/run/run_length.h"
#include "train/run/same_run.h"
#include "train/trainer.h"

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
  const std::string run_id = record_.open(config_.trainer, start_.resume);
  if (start_.resume) total_steps_ = total_steps(config_.trainer, *sampler_, saved_position());
  resolve_schedule();
  initialize_engine(init);
  checkpoints_.emplace(config_.trainer, *engine_, output_.logger,
                       RunName{.id = run_id, .launched = start_.launched_run}, start_.memory);
  if (start_.resume) resume();
  if (!was_finished_)
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
  check_same_run(config_, *comm_, {{"--resume", start_.resume}, {"--init", !start_.init.empty()}});
  digest_ = check_same_data(task_, *comm_);
}

/// Before training: an unknown metric would otherwise be noticed only after the first evaluation.
void Trainer::check_evaluation_config() const {
  if (task_.eval_size() == 0) {
    if (!early_stopping_.enabled()) return;
    throw ConfigError(str("trainer.early_stopping_patience: found ", config_.trainer.early_stopping_patience,
                          ", but nothing is evaluated during training; expected 0, or data with an "
                          "evaluation set"));
  }
  const std::string& metric = config_.trainer.metric_for_best;
  const std::vector<std::string> known = task_.metric_names();
  if (std::find(known.begin(), known.end(), metric) == known.end())
    throw ConfigError(str("trainer.metric_for_best: found \"", metric, "\", which no evaluation of ",
                          task_.name(), " has", config::did_you_mean(metric, known), "; expected one of ",
                          join(known, ", ")));
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
  if (start_.resume) options.loaded_next = [](const std::string&) { return true; };
  if (loads) options.loaded_next = [how](const std::string& name) { return must_be_loaded(name, how); };
  if (config_.engine.memory_breakdown) memory_.emplace(init.device.type());
  EngineConfig engine = config_.engine;
  if (engine.profiler.path.empty())
    engine.profiler.path = (std::filesystem::path(config_.trainer.output_dir) / "profile").string();
  note_failures_of(init.device);
  explain_out_of_memory({.when = "making the model"},
                        [&] { engine_ = &task_.initialize(engine, comm_, options); });
  if (loads) engine_->load_weights(start_.init, how);
  // From here on the ranks' generators differ, so that their dropout differs.
  at::manual_seed(static_cast<uint64_t>(config_.engine.seed + comm_->rank()));
}

/// Collective. The order of an epoch does not depend on the number of ranks or on the batch size, so both may
/// differ from those of the run that is resumed.
void Trainer::resume() {
  start_position_ = start_.restart_from.sources.empty() ? checkpoints_->resume(start_.resume_tag)
                                                        : checkpoints_->resume(start_.restart_from);
  steps_done_ = start_position_.steps_done;
  if (const int64_t epoch = steps_done_ / sampler_->steps_per_epoch();
      counts_epochs(config_.engine.scheduler) && std::abs(epoch - start_position_.data.epoch) > 1)
    output_.logger.warning(
        str("scheduler.params.interval: \"epoch\" counts optimizer steps of the current batch size, which is "
            "not the checkpoint's: the learning rate continues as in epoch ",
            epoch, ", not ", start_position_.data.epoch));
  if (const std::string change = describe_change(start_position_.digest, digest_); !change.empty())
    output_.logger.warning(str("the data have changed since the checkpoint: ", change,
                               ". The evaluation may from now on use samples the model was trained on"));
  early_stopping_.set_state(start_position_.early_stopping);
  // A run that was killed after its last checkpoint has no results: it is evaluated and exported now.
  const bool at_end = steps_done_ >= total_steps_ || stopped_early();
  was_finished_ = record_.has_results() && at_end;
  if (at_end && !was_finished_) checkpoints_->check_best();
}

}  // namespace tessera::train

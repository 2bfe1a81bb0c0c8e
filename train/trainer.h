// Trainer: the training loop. Trains one Task for some epochs or steps, evaluates it, reports, and writes the
// run's files.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "core/log.h"
#include "engine/profile/memory_meter.h"
#include "train/data/data_digest.h"
#include "train/data/train_loader.h"
#include "train/memory/out_of_memory.h"
#include "train/report/early_stopping.h"
#include "train/report/non_finite_warnings.h"
#include "train/report/progress.h"
#include "train/report/report.h"
#include "train/report/step_meter.h"
#include "train/run/run_checkpoints.h"
#include "train/run/run_record.h"
#include "train/task/sampler.h"
#include "train/task/task.h"
#include "train/task/trainer_config.h"

namespace tessera::train {

/// Where a Trainer writes. Ranks other than 0 write nothing, whatever is given.
struct TrainerOutput {
  Display display;  ///< progress and results
  Logger logger;    ///< warnings
};

/// How a run starts and stops.
struct TrainerStart {
  bool resume = false;            ///< from a checkpoint in its output folder
  std::string resume_tag = {};    ///< which checkpoint; empty: the latest
  RestartFrom restart_from = {};  ///< after a restart, instead of resume_tag (train/restart.h)
  /// Of a program other than `tessera train`: the run begins with its weights, optimizer states and steps,
  /// and with its data where as many samples are used. Ignored by a resumed run. Empty: none.
  std::filesystem::path begin_from = {};
  std::string begin_tag = {};       ///< which checkpoint of that folder; empty: the newest
  bool allow_partial_load = false;  ///< LoadOptions::allow_partial_load of it
  std::string init = {};            ///< weights to start from, ignored by a resumed run: what
                                    ///< Engine::load_weights() takes; empty: the model's own initialization
  LoadWeightsOptions init_options = {};  ///< how they are matched to the model, added to the task's options
  std::function<void()> joined = {};  ///< called once all ranks have connected. From then on `stop` is asked
                                      ///< and may end the run. May be unset
  /// Asked before each step on each rank; true on any rank: save and end. May be unset.
  std::function<bool()> stop;
  int64_t max_eval_samples = INT64_MAX;  ///< of each set, in an evaluation
  std::string launched_run = {};         ///< stored in the run's checkpoints (train/restart.h); may be empty
  /// Has the folders for trainer.save_in_memory_every_steps; unset: there are no such folders.
  std::shared_ptr<HostFolders> memory = {};
};

/// Trains a task. Owns the run's output files, data loader and progress bar. Borrows the task, which must
/// outlive it. Used by one thread.
class Trainer {
 public:
  /// Collective. Compares the ranks' configurations and data, creates and locks the output folder, seeds
  /// torch's generator and initializes the task's engine (`init`: device and local rank; the rest is filled
  /// in). Throws ConfigError, on every rank alike, when
  /// - the ranks' configurations or data differ,
  /// - the task has no metric named trainer.metric_for_best,
  /// - the output folder cannot be written, or another process uses it,
  /// - it has checkpoints of an unfinished run, unless this run resumes it or
  ///   trainer.overwrite_output_dir is true,
  /// - the training set is smaller than one batch,
  /// - early stopping is asked for, and there is nothing to evaluate.
  Trainer(RunConfig run, Task& task, comm::CommunicatorPtr comm, const InitOptions& init,
          const TrainerOutput& output, TrainerStart start = {});

  /// Collective. Trains to the end, or until told to stop. To be called once. Changes nothing when the
  /// resumed run had finished. The summary is equal on every rank, except for times and files.
  Summary run();

 private:
  // before the first step
  std::optional<Position> saved_position();
  void compare_ranks();
  void check_evaluation_config() const;
  void warn_of_no_effect() const;
  void resolve_schedule();
  void initialize_engine(const InitOptions& init);
  void resume();
  void begin_elsewhere();
  void warn_of_epochs() const;

  // the loop
  Summary train();
  void print_header();
  void prepare_loop();
  void train_step();
  void save();
  void save_in_memory();
  Position position();
  void explain_out_of_memory(const MemoryDemand& demand, const std::function<void()>& body);
  MemoryDemand evaluation_demand(const char* when) const;
  int64_t epochs_completed() const;
  double epochs_done() const;
  bool stopped_early() const { return early_stopping_.should_stop(); }

  // reports and evaluations within the loop
  bool report_due() const;
  bool evaluation_due() const;
  bool records_histograms() const;
  bool histograms_due() const;
  void report();
  void log_histograms();
  void evaluate();
  void update_early_stopping();
  void write_samples(bool is_recorded = true);
  void write_state();
  StepWindow finish_window();

  // after the last step
  Summary finish();
  void evaluate_final_weights(Summary& summary);
  Evaluation evaluate_final_weights(EvaluationSet set);
  Summary report_finished();
  Summary summary_without_results() const;
  void describe_model(Summary& summary) const;

  RunConfig config_;
  Task& task_;
  comm::CommunicatorPtr comm_;
  TrainerOutput output_;
  TrainerStart start_;
  RunRecord record_;
  EarlyStopping early_stopping_;

  // Set by the constructor.
  DataDigest digest_;
  std::optional<TrainSampler> sampler_;
  int64_t total_steps_ = 0;
  std::optional<MemoryMeter> memory_;  // with memory_breakdown
  Engine* engine_ = nullptr;           // owned by the task
  size_t first_group_ = 0;             // of those with parameters
  std::optional<RunCheckpoints> checkpoints_;
  Position start_position_;    // where this process begins
  bool was_finished_ = false;  // an earlier process has finished the run and written its results

  // Set by run().
  std::optional<StepMeter> meter_;
  std::unique_ptr<ProgressBar> bar_;
  std::unique_ptr<TrainLoader> loader_;
  std::optional<NonFiniteWarnings> non_finite_;

  int64_t steps_done_ = 0;
  double learning_rate_ = 0;  // of the last step, of the first param group that has parameters
  std::optional<Evaluation> last_evaluation_;
};

}  // namespace tessera::train

// Trainer: the training loop. Runs one Task for some epochs or steps, evaluates
// it, reports, and writes the run's files.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "core/log.h"
#include "engine/memory_meter.h"
#include "train/data_digest.h"
#include "train/early_stopping.h"
#include "train/progress.h"
#include "train/report.h"
#include "train/run_checkpoints.h"
#include "train/run_record.h"
#include "train/sampler.h"
#include "train/step_meter.h"
#include "train/task.h"
#include "train/train_loader.h"
#include "train/trainer_config.h"

namespace tessera::train {

/// Where a Trainer talks. Ranks other than 0 stay silent, whatever is given.
struct TrainerOutput {
  Display display;  ///< progress and results
  Logger logger;    ///< warnings
};

/// How a run begins and ends.
struct TrainerStart {
  bool resume = false;          ///< from a checkpoint in its folder
  std::string resume_tag = {};  ///< which; empty: the latest
  std::string init = {};  ///< weights to start from, unless the run is resumed: a .safetensors file, or a
                          ///< folder with one; empty: the model's own
  LoadWeightsOptions init_options = {};  ///< how they fit, besides what the task says
  std::function<void()> joined = {};  ///< called when all ranks have met: from then on `stop` is asked, and
                                      ///< what interrupts a wait is the program's. May be unset
  std::function<bool()>
      stop;  ///< asked before each step on each rank; true on any of them: save and end. May be unset
};

/// Owns the run's output; borrows the task, which must outlive it. One thread uses it.
class Trainer {
 public:
  /// Collective. Compares the ranks' configurations and data, creates and locks the output folder, seeds
  /// torch's generator and initializes the task's engine (`init`: device and local rank; the rest is filled
  /// in). Throws ConfigError (on every rank alike) when ranks are to do different things, the metric is none
  /// of the task's, the folder cannot be written, is another run's that lives, has checkpoints of a run that
  /// has not finished (unless this one resumes it, or trainer.overwrite_output_dir is true), the data are
  /// fewer than one batch, or training is to stop early without an evaluation.
  Trainer(RunConfig run, Task& task, comm::CommunicatorPtr comm, const InitOptions& init,
          const TrainerOutput& output, TrainerStart start = {});

  /// Collective. Trains to the end, or until told to stop, once; a resumed run that had finished stays as it
  /// is. The summary is equal on every rank, but for times and files.
  Summary run();

 private:
  Summary train();
  void resume();
  void announce();
  void train_step();
  template <class Body>
  void watching_memory(const std::string& when, const Body& body);
  bool report_due() const;
  bool evaluation_due() const;
  bool histograms_due() const;
  void report();
  void send_histograms();
  void evaluate();
  void note_for_early_stopping();
  void write_samples(bool is_recorded = true);
  void write_state();
  bool stopped_early() const { return early_stopping_.should_stop(); }
  void measure(Summary& summary);
  Evaluation measure(EvaluationSet set);
  void save();
  Position position();
  StepWindow finish_window();
  void warn_of_loss(const StepWindow& window);
  std::string describe_loss(const StepWindow& window);
  void warn_of(const Evaluation& evaluation);
  void check_metric() const;
  Summary finish();
  Summary report_finished();
  Summary outline() const;
  void name_model(Summary& summary) const;
  int64_t epochs_ended() const;
  double epochs_done() const;

  RunConfig config_;
  Task& task_;
  comm::CommunicatorPtr comm_;
  TrainerOutput output_;
  DataDigest digest_;
  TrainSampler sampler_;
  TrainerStart start_;
  int64_t total_steps_ = 0;
  RunRecord record_;
  Engine* engine_ = nullptr;           // the task's
  std::optional<MemoryMeter> memory_;  // memory_breakdown
  std::optional<StepMeter> meter_;
  std::unique_ptr<ProgressBar> bar_;
  std::optional<Evaluation> last_evaluation_;
  std::optional<RunCheckpoints> checkpoints_;
  int64_t steps_done_ = 0;
  bool was_finished_ = false;            // by an earlier process, results included
  Position start_position_;              // where this process begins
  std::unique_ptr<TrainLoader> loader_;  // of run()
  EarlyStopping early_stopping_;
  double learning_rate_ = 0;       // of the last step
  int64_t window_start_ = 0;       // steps done where the meter's window begins
  EpochPosition window_position_;  // and where the data stood
  bool loss_was_finite_ = true;
  bool evaluation_was_finite_ = true, test_was_finite_ = true;
};

}  // namespace tessera::train

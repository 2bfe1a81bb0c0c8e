// RunCheckpoints: when a run saves checkpoints, which it keeps, and how it resumes from one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "core/log.h"
#include "engine/checkpoint/host_folders.h"
#include "engine/engine.h"
#include "train/data/data_digest.h"
#include "train/report/early_stopping.h"
#include "train/report/evaluate.h"
#include "train/report/step_meter.h"
#include "train/task/sampler.h"
#include "train/task/trainer_config.h"

namespace tessera::train {

/// The training state outside of the engine, stored in each checkpoint's client_state.
struct Position {
  int64_t steps_done = 0;  ///< optimizer steps
  EpochPosition data;
  TrainTotals totals;  ///< of these steps, by all processes of the run
  EarlyStoppingState early_stopping;
  DataDigest digest;  ///< of the data trained on; empty: not known (older checkpoints)
  bool operator==(const Position&) const = default;
};

/// Collective. The position stored in the checkpoint `tag` (empty: the latest) in `folder`, read by rank 0.
/// nullopt if it cannot be read; loading the checkpoint then throws and gives the reason.
std::optional<Position> saved_position(const std::filesystem::path& folder, const std::string& tag,
                                       comm::Communicator& comm);

/// Collective. Where a run goes on that begins with what another program has saved, read by rank 0: after its
/// steps, and in the data after the samples that it had used. Where it does not say how many these were, they
/// are steps of this run's batch, and a warning says so. Throws CheckpointError.
Position begun_position(const std::filesystem::path& source, const std::string& tag,
                        const TrainSampler& sampler, comm::Communicator& comm, const Logger& log);
/// The position after this many steps of another program, and samples.
Position position_after(int64_t steps, int64_t samples, const TrainSampler& sampler);

/// These keys in the trainer's part of client_state hold the start of a launcher that has saved the
/// checkpoint (launched_run()), and the run.
inline constexpr const char* kLaunchedKey = "run_id";
inline constexpr const char* kRunKey = "run";
inline constexpr size_t kRunIdBytes = 8;  ///< of random numbers in a run's id

/// What a run is called in its checkpoints. Empty parts are not stored.
struct RunName {
  std::string id = {};        ///< RUN/run_id: the same however often the run is resumed
  std::string launched = {};  ///< launched_run(): the same after restarts
};

/// Where a run may continue from after a restart.
struct RestartFrom {
  struct Source {
    bool in_memory = false;  ///< the one that HostFolders::find() has found
    std::string tag;
  };
  std::vector<Source> sources =
      {};  ///< the best first; each of the others where those before cannot be loaded
  std::vector<std::string> damaged = {};  ///< what was not used, and why: one line each
};

/// The best evaluation so far, by trainer.metric_for_best.
struct Best {
  double value = 0;
  int64_t step = 0;
  std::string tag;  ///< of its checkpoint
  bool operator==(const Best&) const = default;
};

/// Whether `tessera train` has saved the checkpoint `tag` (empty: the newest) of this folder. Throws
/// CheckpointError where there is none.
bool is_of_a_run(const std::filesystem::path& folder, const std::string& tag);

/// Is called on rank 0. Throws ConfigError if this folder has no checkpoint that a run could be continued
/// from.
void check_has_a_run(const TrainerConfig& config);

/// Is called on rank 0. Throws ConfigError if starting a new run in this folder would discard an unfinished
/// one.
void check_no_unfinished_run(const TrainerConfig& config);
/// Is called on rank 0. Moves the checkpoints of an earlier run to checkpoints/previous (itself a checkpoint
/// directory), so that a new run cannot be resumed from them. They are removed once the new run has a
/// complete checkpoint. Throws tessera::Error.
void set_aside_checkpoints(const std::filesystem::path& output_dir);

/// Saves, keeps and loads the run's checkpoints in OUTPUT_DIR/checkpoints/. Borrows the engine. Its state is
/// equal on all ranks. Used by one thread.
class RunCheckpoints {
 public:
  /// `run`: an empty id becomes that of the checkpoint which resume() loads. `memory`: may be unset.
  RunCheckpoints(const TrainerConfig& config, Engine& engine, Logger log, RunName run = {},
                 std::shared_ptr<HostFolders> memory = {});

  /// Whether to save after this step, by trainer.save_every_steps and save_every_epochs.
  /// `epochs_completed`: the number of epochs done if this step is the last of an epoch, else 0.
  bool due(int64_t steps_done, int64_t epochs_completed, int64_t total_steps) const;
  /// Records an evaluation. Returns true if it is the best so far and should be saved. Waits for an
  /// asynchronous save only if that is the best checkpoint's.
  bool is_best(const Evaluation& evaluation, int64_t steps_done);
  /// Collective. Saves a checkpoint unless this step has one. Returns whether it did. With `must_succeed` a
  /// failure is thrown (CheckpointError). Otherwise the first of several failures in a row is logged, and
  /// training continues. A step whose evaluation is the best is the best also if only a later save of that
  /// step succeeds.
  bool save(const Position& position, bool must_succeed);
  /// Whether to save in memory after this step, by trainer.save_in_memory_every_steps. Not where
  /// save() has.
  bool due_in_memory(int64_t steps_done) const;
  /// Collective. Saves in memory, in place of the last such save. The first of several failures in a row is
  /// logged, and training continues.
  void save_in_memory(const Position& position);
  /// Collective. Loads the checkpoint `tag` (empty: the latest) of this run's folder. Throws CheckpointError
  /// if there is none, it is another run's, or it does not fit the engine.
  Position resume(const std::string& tag);
  /// Collective. Loads the first of these that can be loaded. One in memory that cannot is removed there.
  /// Says what was damaged and what was loaded instead. Throws ConfigError if there is none.
  Position resume(const RestartFrom& restart);
  /// Collective. Loads what another program than `tessera train` has saved: weights, optimizer states, steps,
  /// the place in the schedule, loss scale. Options of optimizer and schedule are the configuration's. Says
  /// in a warning each what could not be taken over. Throws CheckpointError.
  void begin_from(const std::filesystem::path& source, const std::string& tag, bool allow_partial_load);
  /// Collective, after resume(), of a run that has done all of its steps: verifies the best checkpoint, whose
  /// weights are still to be loaded. One that is damaged is no longer the best, and a warning says so: else
  /// each restart would fail at the end as the one before.
  void check_best();
  /// The run's id, which is not empty.
  const std::string& run_id() const { return run_.id; }
  /// The path of the checkpoint that resume() or begin_from() has loaded; else empty.
  const std::string& resumed_from() const { return resumed_from_; }
  /// Collective. Waits for an asynchronous save. Throws CheckpointError.
  void finish();
  /// Whether the final weights, which are tested and exported, are the best checkpoint's. Otherwise
  /// they are the last step's: trainer.load_best_at_end is false, or nothing was evaluated.
  bool final_is_best() const { return best_ && config_.load_best_at_end; }
  /// Collective. Loads the final weights into the engine. Throws CheckpointError.
  void load_final_weights();
  /// Collective. Writes the final weights, full and in fp32, to OUTPUT_DIR/model.safetensors and returns its
  /// path. Throws CheckpointError.
  std::filesystem::path export_model(const std::filesystem::path& output_dir);

  const std::filesystem::path& folder() const { return folder_; }
  const std::optional<Best>& best() const { return best_; }
  bool saves() const { return config_.save_every_epochs > 0 || config_.save_every_steps > 0; }
  const std::string& last_tag() const { return last_tag_; }
  /// Returns text for the message of an error that ends the run: its last complete checkpoint, and how to
  /// resume from it.
  std::string resume_hint() const;

 private:
  Position load(const std::filesystem::path& source, const std::string& tag, HostFolders* folders);
  void check_same_run(const std::string& path, const nlohmann::json& client_state);
  std::string others_than(const std::string& tag) const;
  const std::string& final_tag() const { return final_is_best() ? best_->tag : last_tag_; }
  bool exists(const std::string& tag) const;
  std::string newest_complete() const;
  void check_last_save();
  bool best_is_being_saved() const;
  void best_was_not_saved();
  void take_up_unsaved_best(int64_t steps_done);
  void remove_previous() const;
  void remove_old_checkpoints() const;

  TrainerConfig config_;
  Engine& engine_;
  Logger log_;
  std::filesystem::path folder_;
  std::shared_ptr<HostFolders> memory_;
  RunName run_;
  std::string resumed_from_;
  std::optional<Best> best_;
  std::optional<Best> best_before_;   // the best again if the save of best_ fails
  std::optional<Best> unsaved_best_;  // better than best_; its save failed, and may be retried at its step
  std::string last_tag_;              // of the last save, which may still be running
  std::string complete_tag_;          // of the last save known to be complete
  int64_t saved_at_step_ = -1;
  bool last_save_failed_ = false;            // and this has been logged
  bool last_save_in_memory_failed_ = false;  // the same
};

}  // namespace tessera::train

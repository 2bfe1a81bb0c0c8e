// RunCheckpoints: which checkpoints a run saves and keeps, and where it goes on after loading one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "core/log.h"
#include "engine/engine.h"
#include "train/data_digest.h"
#include "train/early_stopping.h"
#include "train/evaluate.h"
#include "train/sampler.h"
#include "train/step_meter.h"
#include "train/trainer_config.h"

namespace tessera::train {

/// Where a run stands, but for what the engine knows.
struct Position {
  int64_t steps_done = 0;  ///< optimizer steps
  EpochPosition data;
  TrainTotals totals;  ///< of these steps
  EarlyStoppingState early_stopping;
  DataDigest digest;  ///< of the data they were of; empty: not known
  bool operator==(const Position&) const = default;
};

/// Collective. Where the checkpoint `tag` (empty: the latest) of the run in this folder, which rank 0 reads,
/// stands; nothing where none can be read: loading it says why.
std::optional<Position> saved_position(const std::filesystem::path& output_dir, const std::string& tag,
                                       comm::Communicator& comm);

/// The best evaluation so far, by trainer.metric_for_best.
struct Best {
  double value = 0;
  int64_t step = 0;
  std::string tag;  ///< of its checkpoint
  bool operator==(const Best&) const = default;
};

/// Local (rank 0). Throws ConfigError where starting anew in this folder would
/// discard a run that has not finished.
void check_may_start_anew(const TrainerConfig& config);
/// Local (rank 0). Makes way for a run that starts anew: the checkpoints of the run before are put aside, so
/// that there is nothing of it to resume (in checkpoints/previous, a checkpoint directory itself), and
/// removed once the new run has one of its own. Throws tessera::Error.
void set_aside_checkpoints(const std::filesystem::path& output_dir);

/// One rank's end of the run's checkpoints, in OUTPUT_DIR/checkpoints/. Used by
/// one thread; equal on all ranks.
class RunCheckpoints {
 public:
  RunCheckpoints(const TrainerConfig& config, Engine& engine, Logger log);

  /// Local. Whether the run is to be saved after this step, by
  /// trainer.save_every_steps and save_every_epochs. `epochs_ended`: where this step
  /// is the last of an epoch, the number of epochs done; else 0.
  bool due(int64_t steps_done, int64_t epochs_ended, int64_t total_steps) const;
  /// Local. Takes note of an evaluation; true when it is the best so far, and should be saved. Waits for an
  /// asynchronous save only where that is the best one's.
  bool is_best(const Evaluation& evaluation, int64_t steps_done);
  /// Collective. Saves, once a step; false where there was nothing to save, or it failed. A
  /// failure is logged, the first of several in a row, and training goes on; with
  /// `must_succeed` it is thrown (CheckpointError).
  bool save(const Position& position, bool must_succeed);
  /// Collective. Continues from the checkpoint `tag`; empty: the latest. Throws CheckpointError
  /// when there is none, or it doesn't fit.
  Position resume(const std::string& tag);
  /// Collective. Waits for an asynchronous save. Throws CheckpointError.
  void finish();
  /// Local. Whether the best checkpoint's weights are what the run ends with; else the last's:
  /// trainer.load_best_at_end is false, or nothing was evaluated.
  bool ends_with_best() const { return best_ && config_.load_best_at_end; }
  /// Collective. Gives the engine the weights the run ends with. Throws CheckpointError.
  void load_chosen();
  /// Collective. Writes OUTPUT_DIR/model.safetensors, the full fp32 model the run ends with, and
  /// returns its path. Throws CheckpointError.
  std::filesystem::path export_model(const std::filesystem::path& output_dir);

  const std::filesystem::path& folder() const { return folder_; }
  const std::optional<Best>& best() const { return best_; }
  bool saves() const { return config_.save_every_epochs > 0 || config_.save_every_steps > 0; }
  const std::string& last_tag() const { return last_tag_; }
  /// Local. For an error that ends the run: the checkpoint that is left, and how to go on from it.
  std::string what_is_safe() const;

 private:
  const std::string& chosen_tag() const { return ends_with_best() ? best_->tag : last_tag_; }
  bool is_there(const std::string& tag) const;
  void settle();
  void remove_previous() const;
  void tidy() const;

  TrainerConfig config_;
  Engine& engine_;
  Logger log_;
  std::filesystem::path folder_;
  std::optional<Best> best_, best_before_;
  std::string last_tag_;   // of the last save, which may be under way
  std::string whole_tag_;  // of the last one known to be complete
  int64_t saved_at_step_ = -1;
  bool is_failing_ = false;  // the last save, which was logged
};

}  // namespace tessera::train

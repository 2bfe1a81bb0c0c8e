#include "train/run/run_checkpoints.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/consolidate/convert_checkpoint.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/catalog.h"
#include "comm/init/agreement.h"
#include "core/error.h"
#include "core/files/disk.h"
#include "core/files/temporary_name.h"
#include "core/json/json_reader.h"
#include "core/random_digits.h"
#include "core/str.h"
#include "engine/checkpointing.h"
#include "train/run/run_directory.h"
#include "train/run/run_length.h"

namespace tessera::train {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

/// "accuracy, greatest"
std::string metric_name(const TrainerConfig& config) {
  return str(config.metric_for_best, config.greater_is_better() ? ", greatest" : ", least");
}

bool is_better(double value, double other, const TrainerConfig& config) {
  return config.greater_is_better() ? value > other : value < other;
}

json to_json(const Best& best) { return {{"value", best.value}, {"step", best.step}, {"tag", best.tag}}; }

/// `best_before`: the best if `best` turns out not to have been saved.
json to_json(const Position& position, const std::optional<Best>& best,
             const std::optional<Best>& best_before, const TrainerConfig& config, const RunName& run) {
  json state;
  if (!run.launched.empty()) state[kLaunchedKey] = run.launched;
  if (!run.id.empty()) state[kRunKey] = run.id;
  state["steps_done"] = position.steps_done;
  state["epoch"] = position.data.epoch;
  state["samples_into_epoch"] = position.data.samples_into_epoch;
  const TrainTotals& totals = position.totals;
  state["totals"] = {{"loss_sum", std::isfinite(totals.loss_sum) ? json(totals.loss_sum) : json(nullptr)},
                     {"loss_count", totals.loss_count},
                     {"seconds", totals.seconds},
                     {"num_samples", totals.num_samples}};
  state["metric"] = metric_name(config);  // of `best` and early_stopping
  if (best) state["best"] = to_json(*best);
  if (best_before) state["best_before"] = to_json(*best_before);
  const EarlyStoppingState& stopping = position.early_stopping;
  if (stopping != EarlyStoppingState{})
    state["early_stopping"] = {{"best", stopping.best ? json(*stopping.best) : json(nullptr)},
                               {"num_stale", stopping.num_stale}};
  if (!position.digest.empty()) state["data"] = to_json(position.digest);
  return {{"trainer", state}};
}

/// Throws json::exception for a client_state that was not written by to_json() above.
Position position_of(const json& client_state) {
  const json& state = client_state.at("trainer");
  Position position;
  position.steps_done = state.at("steps_done");
  position.data = {state.at("epoch"), state.at("samples_into_epoch")};
  if (state.contains("totals")) {  // checkpoints of older versions have none
    const json& totals = state.at("totals");
    const json& loss_sum = totals.at("loss_sum");  // null: not a number
    position.totals = {
        .loss_sum = loss_sum.is_number() ? loss_sum.get<double>() : std::numeric_limits<double>::quiet_NaN(),
        .loss_count = totals.at("loss_count"),
        .seconds = totals.at("seconds"),
        .num_samples = totals.at("num_samples")};
  }
  if (state.contains("early_stopping")) {
    const json& stopping = state.at("early_stopping");
    if (stopping.at("best").is_number()) position.early_stopping.best = stopping.at("best").get<double>();
    position.early_stopping.num_stale = stopping.at("num_stale").get<int64_t>();
  }
  if (state.contains("data")) position.digest = digest_from_json(state.at("data"));
  return position;
}

/// `key`: "best" or "best_before".
std::optional<Best> best_of(const json& client_state, const char* key) {
  const json& state = client_state.at("trainer");
  if (!state.contains(key)) return std::nullopt;
  const json& best = state.at(key);
  return Best{best.at("value").get<double>(), best.at("step").get<int64_t>(),
              best.at("tag").get<std::string>()};
}

/// A checkpoint of another run than the one of this folder.
class AnotherRun : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

constexpr const char* kAdvice =
    "to start from its weights alone, tessera consolidate makes a file of them for --init";

/// The tags of the checkpoints whose manifest can be read and whose files have their lengths, from the oldest
/// save to the newest.
std::vector<std::string> complete_checkpoints(const fs::path& folder) {
  std::vector<std::string> tags = checkpoint::list_checkpoints(folder);
  std::erase_if(tags, [&](const std::string& tag) {
    try {
      checkpoint::Checkpoint::open(folder, tag);
      return false;
    } catch (const Error&) {
      return true;
    }
  });
  return tags;
}

// A new run in an old folder: A run's checkpoints/ holds only its own checkpoints. Those of an earlier
// run are moved to checkpoints/previous first, beginning with the file `latest`, so that a new run killed
// before its first save is not resumed as the old one. They are deleted when the new run has a complete
// checkpoint, so that there is one at any time. A crash during the move leaves checkpoints without `latest`;
// the next run moves those too.
constexpr const char* kPrevious = "previous";

fs::path previous_checkpoints(const fs::path& output_dir) { return checkpoints_of(output_dir) / kPrevious; }

}  // namespace

std::optional<Position> saved_position(const fs::path& folder, const std::string& tag,
                                       comm::Communicator& comm) try {
  const comm::Answer state = comm::ask_rank_0(comm, "position in the data", [&] {
    return checkpoint::read_manifest(checkpoint::find_checkpoint(folder, tag))
        .state.at("client_state")
        .dump();
  });
  return state.is_failure ? std::nullopt : std::optional(position_of(parse_json(state.text)));
} catch (const json::exception&) {
  return std::nullopt;
}

Position position_after(int64_t steps, int64_t samples, const TrainSampler& sampler) {
  const int64_t epoch = sampler.samples_per_epoch();
  return {.steps_done = steps,
          .data = {samples / epoch, samples % epoch},
          .totals = {},
          .early_stopping = {},
          .digest = {}};
}

Position begun_position(const fs::path& source, const std::string& tag, const TrainSampler& sampler,
                        comm::Communicator& comm, const Logger& log) {
  const json read = parse_json(comm::from_rank_0<CheckpointError>(comm, "steps and samples", [&] {
    const json state = checkpoint::Checkpoint::open(source, tag).manifest().state;
    const auto at = [&](const char* path) { return state.value(json::json_pointer(path), json()); };
    return json::array({at("/global_steps"), at("/client_state/tessera.global_samples"),
                        at("/config/train_batch_size")})
        .dump();
  }));
  const int64_t steps = read[0].is_number_integer() ? read[0].get<int64_t>() : 0;
  if (read[1].is_number_integer()) return position_after(steps, read[1].get<int64_t>(), sampler);
  const int64_t own_batch = sampler.shape().global_batch();
  if (!read[2].is_number_integer() && steps > 0)
    log.warning(str(source, ": does not say how many samples were used: the data go on as after ", steps,
                    " steps of this run's batch of ", own_batch));
  return position_after(steps, steps * (read[2].is_number_integer() ? read[2].get<int64_t>() : own_batch),
                        sampler);
}

bool is_of_a_run(const fs::path& folder, const std::string& tag) {
  const checkpoint::FoundCheckpoint found = checkpoint::choose_checkpoint(folder, tag);
  if (found.tag.empty()) return false;
  const json state = checkpoint::read_manifest(found.directory / found.tag).state;
  return state.contains(json::json_pointer("/client_state/trainer"));
}

void check_has_a_run(const TrainerConfig& config) {
  std::error_code error;
  if (fs::exists(checkpoints_of(config.output_dir), error)) return;
  throw ConfigError("--resume: trainer.output_dir ", config.output_dir,
                    " has no checkpoints; expected the folder of a run that has saved one, or no --resume "
                    "for a new run there");
}

void check_no_unfinished_run(const TrainerConfig& config) {
  const fs::path folder = checkpoints_of(config.output_dir);
  std::error_code error;
  if (config.overwrite_output_dir || fs::exists(fs::path(config.output_dir) / kResultsName, error)) return;
  if (!fs::exists(folder / checkpoint::kLatestName, error)) return;
  const std::vector<std::string> tags = checkpoint::list_checkpoints(folder);
  if (tags.empty()) return;
  throw ConfigError(
      "trainer.output_dir: ", config.output_dir,
      " has checkpoints of a run that has not finished (the last: ", tags.back(),
      "); expected --resume to continue it, --set trainer.overwrite_output_dir=true to replace it with a new "
      "run, or another folder");
}

void set_aside_checkpoints(const fs::path& output_dir) {
  const fs::path folder = checkpoints_of(output_dir), previous = previous_checkpoints(output_dir);
  const std::vector<std::string> tags = checkpoint::list_checkpoints(folder);
  if (tags.empty()) return;
  const Disk disk({.sync = false, .probe = {}});
  std::error_code error;
  const bool has_latest = fs::exists(folder / checkpoint::kLatestName, error);
  if (has_latest) disk.remove_all(previous);
  disk.create_directories(previous);
  if (has_latest) disk.rename(folder / checkpoint::kLatestName, previous / checkpoint::kLatestName);
  for (const std::string& tag : tags) {
    disk.remove_all(previous / tag);
    disk.rename(folder / tag, previous / tag);
  }
}

RunCheckpoints::RunCheckpoints(const TrainerConfig& config, Engine& engine, Logger log, RunName run,
                               std::shared_ptr<HostFolders> memory)
    : config_(config),
      engine_(engine),
      log_(std::move(log)),
      folder_(checkpoints_of(config.output_dir)),
      memory_(std::move(memory)),
      run_(std::move(run)) {}

bool RunCheckpoints::due(int64_t steps_done, int64_t epochs_completed, int64_t total_steps) const {
  if (!saves()) return false;
  if (steps_done == total_steps) return true;
  return is_due(steps_done, config_.save_every_steps) || is_due(epochs_completed, config_.save_every_epochs);
}

bool RunCheckpoints::is_best(const Evaluation& evaluation, int64_t steps_done) {
  if (!saves()) return false;
  const double value =
      evaluation.find(config_.metric_for_best).value();  // the Trainer has checked that it exists
  if (!std::isfinite(value)) return false;
  if (best_is_being_saved()) check_last_save();  // a failed save is no best
  if (best_ && !is_better(value, best_->value, config_)) return false;
  best_before_ = best_;
  best_ = Best{value, steps_done, str("global_step", engine_.global_steps())};
  return true;
}

/// The save of the best is not known to have succeeded.
bool RunCheckpoints::best_is_being_saved() const { return best_ && best_->step == saved_at_step_; }

/// The one before is the best again. But its weights are still there: a save of this step may yet succeed.
void RunCheckpoints::best_was_not_saved() { unsaved_best_ = std::exchange(best_, best_before_); }

/// A save of this step begins.
void RunCheckpoints::take_up_unsaved_best(int64_t steps_done) {
  const std::optional<Best> unsaved = std::exchange(unsaved_best_, std::nullopt);
  if (!unsaved) return;
  if (unsaved->step == steps_done) {
    best_before_ = best_;
    best_ = unsaved;
    return;
  }
  const bool best_is_of_now = best_ && best_->step == steps_done;  // which is not saved yet
  if (best_is_of_now && is_better(best_->value, unsaved->value, config_)) return;
  const std::optional<Best>& saved = best_is_of_now ? best_before_ : best_;
  log_.warning(str("the evaluation after step ", unsaved->step,
                   ", the best so far, has no checkpoint, because "
                   "its save failed; the best that has one is ",
                   saved ? str("of step ", saved->step) : std::string("none")));
}

/// Handles the outcome of the last save, waiting for it if it is asynchronous. The outcome is equal on all
/// ranks.
void RunCheckpoints::check_last_save() {
  if (engine_.last_save_failed()) {
    if (best_is_being_saved()) best_was_not_saved();
    last_tag_ = complete_tag_;
    saved_at_step_ = -1;
  }
  complete_tag_ = last_tag_;
  if (!complete_tag_.empty()) remove_previous();
}

void RunCheckpoints::remove_previous() const {
  const fs::path previous = previous_checkpoints(config_.output_dir);
  std::error_code error;
  if (engine_.rank() != 0 || !fs::exists(previous, error)) return;
  const Disk disk({.sync = false, .probe = {}});
  try {
    const fs::path away = folder_ / temporary_name(kPrevious);
    disk.rename(previous, away);  // so that no half-deleted checkpoint looks complete
    disk.remove_all(away);
  } catch (const Error& caught) {
    log_.warning(str("the checkpoints of the earlier run could not be removed: ", caught.what()));
  }
}

bool RunCheckpoints::save(const Position& position, bool must_succeed) {
  if (must_succeed || saved_at_step_ != position.steps_done) check_last_save();
  if (saved_at_step_ == position.steps_done) return false;
  take_up_unsaved_best(position.steps_done);
  try {
    if (best_) engine_.keep_checkpoints({best_->tag});
    const std::string path =
        engine_.save_checkpoint(folder_.string(), "", to_json(position, best_, {}, config_, run_));
    last_tag_ = std::filesystem::path(path).filename().string();
    saved_at_step_ = position.steps_done;
    if (!engine_.config().checkpoint.async) check_last_save();
    if (std::exchange(last_save_failed_, false)) log_.info(str("checkpoints are saved again: ", path));
    return true;
  } catch (const CheckpointError& error) {
    if (best_ && best_->step == position.steps_done) best_was_not_saved();
    if (must_succeed) throw;
    if (!std::exchange(last_save_failed_, true))  // once in a row: a full disk stays full
      log_.warning(str("no checkpoint at step ", position.steps_done,
                       ", training continues and the next save is tried again: ", error.what(), "; ",
                       resume_hint()));
    return false;
  }
}

bool RunCheckpoints::due_in_memory(int64_t steps_done) const {
  return memory_ && saved_at_step_ != steps_done && is_due(steps_done, config_.save_in_memory_every_steps);
}

void RunCheckpoints::save_in_memory(const Position& position) {
  try {
    const std::optional<Best> best_before = best_is_being_saved() ? best_before_ : std::nullopt;
    engine_.save_in_memory(*memory_, to_json(position, best_, best_before, config_, run_));
    last_save_in_memory_failed_ = false;
  } catch (const CheckpointError& error) {
    if (!std::exchange(last_save_in_memory_failed_, true))
      log_.warning(str("no checkpoint in memory at step ", position.steps_done,
                       ", training continues and the next save is tried again: ", error.what()));
  }
}

Position RunCheckpoints::resume(const std::string& tag) {
  try {
    return load(folder_, tag, nullptr);
  } catch (const AnotherRun&) {
    throw;
  } catch (const CheckpointError& error) {  // the same on all ranks
    const std::string what = error.what();
    // What does not fit will not fit as it was before, either.
    throw CheckpointError(what.find(kAdvice) != what.npos ? what : what + others_than(tag));
  }
}

Position RunCheckpoints::resume(const RestartFrom& restart) {
  std::vector<std::string> damaged = restart.damaged;
  for (const RestartFrom::Source& source : restart.sources) {
    HostFolders* const folders = source.in_memory ? memory_.get() : nullptr;
    try {
      const Position position = load(folders ? folders->path() : folder_, source.tag, folders);
      if (folders) folders->release();
      if (!damaged.empty())
        log_.warning(str(join(damaged, "; "), "; the run continues from ", resumed_from_));
      return position;
    } catch (const CheckpointError& error) {  // the same on all ranks
      damaged.push_back(error.what());
      if (!folders) continue;
      folders->release();
      folders->discard(source.tag);
      damaged.back() = str("the checkpoint in memory is not used: ", damaged.back());
    }
  }
  // As a mistake in the configuration it would occur again at each restart, and two are enough.
  throw ConfigError("trainer.output_dir: no checkpoint of this run can be loaded: ", join(damaged, "; "),
                    "; expected one, or a new start with --set trainer.overwrite_output_dir=true");
}

void RunCheckpoints::begin_from(const fs::path& source, const std::string& tag, bool allow_partial_load) {
  LoadOptions options;
  options.advice = kAdvice;
  options.allow_partial_load = allow_partial_load;
  options.partial_advice = "--allow-partial-load goes on without";
  const LoadedCheckpoint loaded = engine_.load_checkpoint(source.string(), tag, options);
  resumed_from_ = loaded.path;
  for (const std::string& line : loaded.not_loaded) log_.warning(str(loaded.path, ": ", line));
  for (const std::string& line : loaded.other_values)
    log_.warning(str(loaded.path, ": ", line, ", as the configuration has it"));
  if (engine_.global_steps() == 0)
    log_.warning(str(loaded.path,
                     ": does not say how many steps were done: the run begins with the first, "
                     "at the begin of the data and of the schedule"));
}

/// Collective. `folders`: of a checkpoint in memory, else nullptr.
Position RunCheckpoints::load(const fs::path& source, const std::string& tag, HostFolders* folders) {
  LoadOptions options;
  options.advice = kAdvice;
  options.folders = folders;
  const bool from_folder = folders == nullptr;
  const LoadedCheckpoint loaded = engine_.load_checkpoint(source.string(), tag, options);
  check_same_run(loaded.path, loaded.client_state);
  resumed_from_ = loaded.path;
  last_tag_ = complete_tag_ = from_folder ? loaded.tag : newest_complete();
  try {
    best_ = best_of(loaded.client_state, "best");
    Position position = position_of(loaded.client_state);
    if (loaded.client_state.at("trainer").value("metric", metric_name(config_)) !=
        metric_name(config_)) {  // values of different metrics cannot be compared
      best_.reset();
      position.early_stopping = {};
    }
    const auto is_missing = [&] {
      return best_ && (!from_folder || best_->tag != loaded.tag) && !exists(best_->tag);
    };
    if (is_missing()) best_ = best_of(loaded.client_state, "best_before");  // its save has failed since
    if (is_missing()) best_.reset();  // deleted when a later one was the best
    if (from_folder) saved_at_step_ = position.steps_done;
    return position;
  } catch (const json::exception&) {
    throw CheckpointError(loaded.path,
                          ": was not saved by `tessera train`: its client_state has no position in the data");
  }
}

/// Collective. Throws CheckpointError for a checkpoint of another run. Those of older versions have no id. A
/// folder without one takes the checkpoint's.
void RunCheckpoints::check_same_run(const std::string& path, const json& client_state) {
  const json saved = client_state.is_object()
                         ? client_state.value(json::json_pointer(str("/trainer/", kRunKey)), json())
                         : json();
  const std::string saved_by = saved.is_string() ? saved.get<std::string>() : "";
  if (!saved_by.empty() && !run_.id.empty() && saved_by != run_.id)
    throw AnotherRun(path, ": was saved by the run ", saved_by, ", and this is the folder of the run ",
                     run_.id, " (", fs::path(config_.output_dir) / kRunIdName,
                     "); expected one of its own checkpoints; to continue the other run, give its folder "
                     "as trainer.output_dir; to continue it here, remove that file");
  if (run_.id.empty()) run_.id = saved_by;
  if (run_.id.empty())
    run_.id =
        comm::from_rank_0<Error>(engine_.comm(), "the run's id", [] { return random_digits(kRunIdBytes); });
}

/// Collective. For an error: the checkpoints besides `tag` (empty: the latest) that this run could be resumed
/// from, and how.
std::string RunCheckpoints::others_than(const std::string& tag) const {
  return comm::ask_rank_0(engine_.comm(), "other checkpoints",
                          [&] {
                            std::string refused = tag;
                            try {
                              if (refused.empty()) refused = checkpoint::read_latest(folder_).value_or("");
                            } catch (const CheckpointError&) {
                            }
                            std::vector<std::string> tags = complete_checkpoints(folder_);
                            std::erase(tags, refused);
                            if (tags.empty()) return std::string("; no other checkpoint is complete there");
                            return str("; complete are ", join(tags, ", "),
                                       " (tessera inspect --verify compares every byte): --resume ",
                                       tags.back(), " continues from that one");
                          })
      .text;
}

/// Collective. The tag of the newest checkpoint in the run's folder; empty: there is none.
std::string RunCheckpoints::newest_complete() const {
  return comm::from_rank_0<CheckpointError>(engine_.comm(), "latest checkpoint", [&] {
    const std::vector<std::string> tags = complete_checkpoints(folder_);
    return tags.empty() ? std::string() : tags.back();
  });
}

void RunCheckpoints::check_best() {
  if (!final_is_best()) return;
  const comm::Answer damage = comm::ask_rank_0(engine_.comm(), "best checkpoint", [&] {
    const checkpoint::VerifyReport report = checkpoint::verify(folder_, best_->tag);
    return report.ok() ? std::string() : str(folder_ / best_->tag, ": ", report.problems.front());
  });
  if (damage.text.empty()) return;
  log_.warning(str("the best checkpoint is not used, the last weights are: ", damage.text));
  best_.reset();
}

/// Collective.
bool RunCheckpoints::exists(const std::string& tag) const {
  const comm::Answer found = comm::ask_rank_0(engine_.comm(), "best checkpoint", [&] {
    return checkpoint::read_manifest(checkpoint::find_checkpoint(folder_, tag)).tag;
  });
  if (found.is_failure)
    log_.warning(str("the best checkpoint before is not used, and the best counts from here: ", found.text));
  return !found.is_failure;
}

std::string RunCheckpoints::resume_hint() const {
  if (complete_tag_.empty()) return "there is no checkpoint of this run yet";
  return str(folder_ / complete_tag_, " is complete: the same command and --resume continue from it");
}

void RunCheckpoints::finish() {
  engine_.finish_checkpoint();
  check_last_save();
  remove_old_checkpoints();
}

/// Deletes what a killed process left undeleted. A save does so too; this is for a run that saves no more.
void RunCheckpoints::remove_old_checkpoints() const {
  const auto num = static_cast<int>(engine_.config().checkpoint.keep_last);
  if (engine_.rank() != 0 || complete_tag_.empty()) return;
  const Disk disk({.sync = false, .probe = {}});
  try {
    checkpoint::remove_leftovers(folder_, disk);
    if (num > 0)
      checkpoint::keep_last(
          folder_, {.num = num, .protect = best_ ? std::vector{best_->tag} : std::vector<std::string>{}},
          disk);
  } catch (const Error& caught) {
    log_.warning(str("old checkpoints could not be removed: ", caught.what()));
  }
}

void RunCheckpoints::load_final_weights() {
  if (final_tag() == last_tag_) return;
  LoadOptions options;
  options.load_module_only = true;
  engine_.load_checkpoint(folder_.string(), final_tag(), options);
}

std::filesystem::path RunCheckpoints::export_model(const std::filesystem::path& output_dir) {
  return comm::from_rank_0<CheckpointError>(engine_.comm(), "exported model", [&] {
    checkpoint::ConvertOptions options{.target = checkpoint::ConvertTarget::kSafetensors};
    options.directory = folder_;
    options.tag = final_tag();
    options.output = output_dir / kModelName;
    options.disk.sync = engine_.config().checkpoint.fsync;
    checkpoint::convert_checkpoint(options);
    return options.output.string();
  });
}

}  // namespace tessera::train

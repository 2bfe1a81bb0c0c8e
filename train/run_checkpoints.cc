#include "train/run_checkpoints.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/consolidate.h"
#include "core/str.h"
#include "engine/checkpoint_types.h"
#include "engine/checkpointing.h"

namespace tessera::train {
namespace {

using nlohmann::json;

json to_json(const Position& position, const std::optional<Best>& best) {
  json state;
  state["steps_done"] = position.steps_done;
  state["epoch"] = position.epoch;
  state["samples_into_epoch"] = position.samples_into_epoch;
  if (best) state["best"] = {{"value", best->value}, {"step", best->step}, {"tag", best->tag}};
  return {{"trainer", state}};
}

/// Throws json::exception for a client_state that is another program's.
Position position_of(const json& client_state) {
  const json& state = client_state.at("trainer");
  return {state.at("steps_done").get<int64_t>(), state.at("epoch").get<int64_t>(), state.at("samples_into_epoch").get<int64_t>()};
}

std::optional<Best> best_of(const json& client_state) {
  const json& state = client_state.at("trainer");
  if (!state.contains("best")) return std::nullopt;
  const json& best = state.at("best");
  return Best{best.at("value").get<double>(), best.at("step").get<int64_t>(), best.at("tag").get<std::string>()};
}

}  // namespace

RunCheckpoints::RunCheckpoints(const TrainerConfig& config, Engine& engine, Logger log)
    : config_(config), engine_(engine), log_(std::move(log)), folder_(std::filesystem::path(config.output_dir) / "checkpoints") {}

bool RunCheckpoints::due(int64_t steps_done, int64_t steps_per_epoch, int64_t total_steps) const {
  if (!saves()) return false;
  if (steps_done == total_steps) return true;
  if (config_.save_every_steps > 0 && steps_done % config_.save_every_steps == 0) return true;
  return config_.save_every_epochs > 0 && steps_done % (config_.save_every_epochs * steps_per_epoch) == 0;
}

bool RunCheckpoints::is_best(const Evaluation& evaluation, int64_t steps_done) {
  if (!saves()) return false;
  const auto& metrics = evaluation.metrics;
  const auto found = std::find_if(metrics.begin(), metrics.end(), [&](const auto& metric) { return metric.first == config_.metric_for_best; });
  if (found == metrics.end()) {
    if (std::exchange(warned_of_metric_, true)) return false;
    std::string names;
    for (const auto& [name, value] : metrics) names += (names.empty() ? "" : ", ") + name;
    log_.warning(str("trainer.metric_for_best: found \"", config_.metric_for_best, "\", which no evaluation has; expected one of ", names,
                     "; the best checkpoint is not kept"));
    return false;
  }
  const double value = found->second;
  if (!std::isfinite(value)) return false;
  if (best_ && !(config_.greater_is_better() ? value > best_->value : value < best_->value)) return false;
  best_before_ = best_;
  best_ = Best{value, steps_done, str("global_step", engine_.global_steps())};
  return true;
}

void RunCheckpoints::save(const Position& position, bool must_succeed) {
  if (saved_at_step_ == position.steps_done) return;
  try {
    if (best_) engine_.keep_checkpoints({best_->tag});
    const std::string path = engine_.save_checkpoint(folder_.string(), "", to_json(position, best_));
    last_tag_ = std::filesystem::path(path).filename().string();
    saved_at_step_ = position.steps_done;
  } catch (const CheckpointError& error) {
    if (must_succeed) throw;
    log_.warning(str("no checkpoint at step ", position.steps_done, ", training goes on: ", error.what()));
    if (best_ && best_->step == position.steps_done) best_ = best_before_;
  }
}

Position RunCheckpoints::resume() {
  const LoadedCheckpoint loaded = engine_.load_checkpoint(folder_.string());
  last_tag_ = loaded.tag;
  try {
    best_ = best_of(loaded.client_state);
    const Position position = position_of(loaded.client_state);
    saved_at_step_ = position.steps_done;
    return position;
  } catch (const json::exception&) {
    throw CheckpointError(str(loaded.path, ": was not saved by `tessera train`: its client_state has no position in the data"));
  }
}

std::filesystem::path RunCheckpoints::export_model(const std::filesystem::path& output_dir) {
  return from_rank_0(engine_.comm(), "exported model", [&] {
    checkpoint::ConsolidateOptions options;
    options.directory = folder_;
    options.tag = best_ ? best_->tag : last_tag_;
    options.output = output_dir / "model.safetensors";
    options.disk.sync = engine_.config().checkpoint.fsync;
    checkpoint::consolidate(options);
    return options.output.string();
  });
}

}  // namespace tessera::train

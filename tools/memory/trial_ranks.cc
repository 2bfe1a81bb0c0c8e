#include "tools/memory/trial_ranks.h"

#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "core/files/disk.h"
#include "core/files/input_file.h"
#include "core/files/temporary_folder.h"
#include "core/json/json_reader.h"
#include "core/json/json_text.h"
#include "core/str.h"
#include "core/terminal.h"
#include "engine/config/sharding_plan.h"
#include "tools/launch/launch_command.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using train::MemoryTrial;
using train::ModelCount;

fs::path trial_file(const fs::path& folder, int rank) { return folder / str("rank", rank, ".json"); }
fs::path timeline_file(const fs::path& folder, int rank) {
  return folder / str("rank", rank, "_timeline.json");
}

nlohmann::ordered_json to_json(const ModelCount& model) {
  nlohmann::ordered_json json = {
      {"num_trainable", model.num_trainable},   {"num_frozen", model.num_frozen},
      {"num_states", model.num_states},         {"owned", model.owned_state_bytes},
      {"largest", model.largest_owned_bytes},   {"precision", name_of(model.dtype)},
      {"gradients", name_of(model.accumulate)}, {"snapshot", model.async_checkpoints}};
  json["types"] = nlohmann::ordered_json::array();
  for (const ModelCount::OfType& one : model.by_type)
    json["types"].push_back({name_of(one.dtype), one.num_trainable, one.num_frozen});
  return json;
}

ModelCount model_count_of(const nlohmann::ordered_json& json) {
  ModelCount model{.num_trainable = json.at("num_trainable"),
                   .num_frozen = json.at("num_frozen"),
                   .num_states = json.at("num_states"),
                   .owned_state_bytes = json.at("owned"),
                   .largest_owned_bytes = json.at("largest"),
                   .dtype = parse_dtype(json.at("precision").get<std::string>()).value(),
                   .accumulate = parse_dtype(json.at("gradients").get<std::string>()).value(),
                   .async_checkpoints = json.at("snapshot")};
  for (const nlohmann::ordered_json& one : json.at("types"))
    model.by_type.push_back({dtype_named(one.at(0).get<std::string>()).value(), one.at(1), one.at(2)});
  return model;
}

}  // namespace

void show_progress(const std::string& line) {
  if (::isatty(STDERR_FILENO) == 0) return;
  const auto width = static_cast<size_t>(terminal_width(STDERR_FILENO)) - 1;
  std::cerr << '\r' << std::string(width, ' ') << '\r' << line.substr(0, width) << std::flush;
}

void write_trial(const fs::path& folder, const MemoryTrial& trial, bool timeline) {
  if (timeline) {
    nlohmann::ordered_json json = {{"model", to_json(trial.model)}};
    json["timeline"] = train::timeline_json(trial.record, trial.phases);
    replace_file(timeline_file(folder, trial.rank), json_text(json));
  }
  replace_file(trial_file(folder, trial.rank), json_text(to_json(trial)));
}

TrialResult run_trial_ranks(const TrialStart& start, const TrialSetting& setting, const Logger& log) {
  const TemporaryFolder folder("tessera_memory");
  std::vector<std::string> args = start.args;
  for (const std::string& word : {std::string("--trial-stage"), std::to_string(setting.stage),
                                  std::string("--trial-folder"), folder.path().string()})
    args.push_back(word);
  for (const std::string& one : setting.overrides) {
    args.emplace_back("--set");
    args.push_back(one);
  }
  show_progress(setting.label + " ...");
  TrialResult result;
  result.exit_code = run_ranks_of_self(start.launch, args, log);
  show_progress("");
  if (result.exit_code != 0) return result;
  for (const int rank : start.ranks)
    result.ranks.push_back(
        train::memory_trial_of(parse_json(InputFile(trial_file(folder.path(), rank)).read_all())));
  const auto largest = std::max_element(
      result.ranks.begin(), result.ranks.end(),
      [](const MemoryTrial& a, const MemoryTrial& b) { return a.peak.total() < b.peak.total(); });
  result.largest = {.label = setting.label, .trial = *largest, .timeline = {}};
  if (start.timelines) {
    nlohmann::ordered_json json =
        parse_ordered_json(InputFile(timeline_file(folder.path(), largest->rank)).read_all());
    result.largest.trial.model = model_count_of(json.at("model"));
    result.largest.timeline = std::move(json.at("timeline"));
  }
  return result;
}

std::vector<TrialSetting> variants_of(const MemoryTrial& own, const EngineConfig& config,
                                      const std::string& disk_folder) {
  const int64_t accumulation = config.gradient_accumulation_steps;
  std::vector<TrialSetting> variants;
  const auto batch_of = [&](int64_t micro_batch) {
    return std::vector<std::string>{str("train_micro_batch_size_per_gpu=", micro_batch),
                                    str("gradient_accumulation_steps=", accumulation),
                                    str("train_batch_size=", micro_batch * accumulation * own.world_size)};
  };
  const int64_t other_batch = own.micro_batch > 1 ? own.micro_batch / 2 : 2;
  std::vector<std::string> policies = {own.activations};
  for (const char* policy : {"none", "cheap", "block"})
    if (own.activations != policy) policies.emplace_back(policy);
  for (const std::string& policy : policies)
    for (const int64_t micro_batch : {own.micro_batch, other_batch}) {
      if (policy == own.activations && micro_batch == own.micro_batch) continue;
      TrialSetting setting{.stage = own.stage, .overrides = batch_of(micro_batch), .label = ""};
      if (policy != own.activations)
        setting.overrides.push_back(str("activation_checkpointing.policy=", policy));
      setting.label = str("stage ", own.stage, ", recomputation ", policy,
                          micro_batch == own.micro_batch ? "" : str(", micro-batch ", micro_batch));
      variants.push_back(std::move(setting));
    }
  const zero::Sharding sharding = zero::sharding_of(own.stage);
  const bool in_groups = own.world_size > 1 && config.zero.mics_shard_size > 0;  // which refuse state on disk
  const nlohmann::json nowhere = {{"device", "none"}};
  if (own.tiers != train::kTierSettings.front().key) {
    variants.push_back({.stage = own.stage,
                        .overrides = {str("zero_optimization.offload_optimizer=", nowhere.dump()),
                                      str("zero_optimization.offload_param=", nowhere.dump())},
                        .label = str("stage ", own.stage, ", all in memory")});
  } else if (!in_groups && can_offload(sharding, own.world_size, train::kOptimizerOnDisk)) {
    // As a bare word, which --set takes a value for that is no JSON: a folder's name need not be UTF-8.
    const std::string key = "zero_optimization.offload_optimizer";
    variants.push_back(
        {.stage = own.stage,
         .overrides = {key + R"(={"device": "nvme"})", str(key, ".nvme_path=", fs::absolute(disk_folder))},
         .label = str("stage ", own.stage, ", optimizer on disk")});
  }
  return variants;
}

}  // namespace tessera::tools

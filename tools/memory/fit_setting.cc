#include "tools/memory/fit_setting.h"

#include <nlohmann/json.hpp>
#include <system_error>

#include "core/error.h"
#include "core/files/disk.h"
#include "core/files/input_file.h"
#include "core/json/json_reader.h"
#include "core/str.h"
#include "engine/config/document/document.h"
#include "engine/config/parse.h"
#include "tools/common/command_line.h"
#include "train/task/trainer_config.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;
using zero::Tier;

/// The keys of `value`, those of `like` first and in its order.
ordered_json in_order_of(const ordered_json& like, const json& value) {
  if (!value.is_object() || !like.is_object()) return value;
  ordered_json out = ordered_json::object();
  for (const auto& [key, inner] : like.items())
    if (value.contains(key)) out[key] = in_order_of(inner, value.at(key));
  for (const auto& [key, inner] : value.items())
    if (!out.contains(key)) out[key] = inner;
  return out;
}

}  // namespace

std::string place_of(const Setting& setting) {
  const std::string name = setting.tiers->name, separator = ", ";
  const size_t at = name.find(separator);
  const char* const buffers[] = {"", ", 1 buffer", ", small units"};
  return (at == std::string::npos ? name : name.substr(at + separator.size())) +
         buffers[static_cast<size_t>(setting.buffers)];
}

std::vector<std::string> overrides_of(const Setting& setting, const std::string& disk_folder) {
  std::vector<std::string> overrides = {
      str("zero_optimization.stage=", setting.stage),
      str("train_micro_batch_size_per_gpu=", setting.micro_batch),
      str("gradient_accumulation_steps=", setting.accumulation),
      str("train_batch_size=", setting.micro_batch * setting.accumulation * setting.world),
      str("activation_checkpointing.policy=", setting.policy)};
  const auto place = [&](const char* section, Tier tier) {
    const std::string key = str("zero_optimization.", section);
    if (tier == Tier::kDevice) return overrides.push_back(key + R"(={"device": "none"})");
    overrides.push_back(str(key, ".device=", tier == Tier::kHost ? "cpu" : "nvme"));
    if (tier == Tier::kDisk) overrides.push_back(str(key, ".nvme_path=", json(disk_folder).dump()));
    if (setting.buffers != DiskBuffers::kAsConfigured) overrides.push_back(key + ".buffer_count=1");
  };
  place("offload_optimizer", setting.tiers->tiers.optimizer);
  place("offload_param", setting.tiers->tiers.parameters);
  if (setting.buffers == DiskBuffers::kOneOfSmallUnits)
    overrides.push_back(str("zero_optimization.unit_numel=", kSmallUnitNumel));
  return overrides;
}

std::string in_words(const Setting& setting) {
  return str(place_of(setting), ", stage ", setting.stage, ", recomputation ", setting.policy,
             ", micro-batch ", setting.micro_batch, " x ", setting.accumulation,
             setting.world == 1 ? "" : str(" x ", setting.world, " ranks"));
}

fs::path default_fit_output(const fs::path& config) {
  return config.parent_path() / (config.stem().string() + "_fit.json");
}

void check_fit_output(const fs::path& config, const fs::path& output) {
  std::error_code error;
  if (fs::equivalent(config, output, error))
    throw ConfigError("--output ", output,
                      ": is CONFIG itself, whose comments would be lost; "
                      "expected another file");
  const fs::path folder = output.parent_path().empty() ? fs::path(".") : output.parent_path();
  if (fs::is_directory(output, error) || !fs::is_directory(folder, error))
    throw ConfigError("--output ", output, ": ",
                      fs::is_directory(output, error) ? "is a folder" : "its folder does not exist",
                      "; expected the name of a file in a folder that exists");
  check_writable(output);
}

void write_fit_config(const fs::path& config, const std::vector<std::string>& overrides,
                      const Setting& setting, const std::string& disk_folder, const fs::path& output) {
  config::Document document = config::read_document(config.string());
  const config::KeyTable table = train::run_keys();
  std::vector<std::string> all = overrides;
  for (const std::string& one : overrides_of(setting, disk_folder)) all.push_back(one);
  const ordered_json as_written = parse_ordered_json(InputFile(config).read_all(), {.hjson = true});
  config::prepare(document, table, all, nullptr);
  json& zero = document.json->at("zero_optimization");
  for (const char* section : {"offload_optimizer", "offload_param"})
    if (zero.at(section).at("device") == "none") zero.erase(section);
  const std::string text = in_order_of(as_written, *document.json).dump(2) + "\n";
  train::parse_run_config(text, output.string(), setting.world);  // or it would not be what was measured
  replace_file(output, text);
}

}  // namespace tessera::tools

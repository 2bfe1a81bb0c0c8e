#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/catalog.h"
#include "core/error.h"
#include "core/json/json_text.h"
#include "core/log.h"
#include "core/str.h"
#include "core/utf8.h"
#include "tools/commands.h"
#include "tools/common/columns.h"
#include "train/run/run_path.h"

namespace tessera::tools {
namespace {

using checkpoint::Manifest;
using nlohmann::ordered_json;

struct InspectFlags {
  std::string directory;
  std::string tag;
  bool verify = false;
  bool json = false;
};

std::string mebibytes(int64_t bytes) { return fixed(static_cast<double>(bytes) / (1 << 20), 1) + " MiB"; }

std::string shown(const std::string& text) { return without_control_characters(text, /*one_line=*/true); }

/// A number of the engine's state; -1 if it has no number of that name.
int64_t state_number(const Manifest& manifest, const char* name) {
  const auto found = manifest.state.find(name);
  return found != manifest.state.end() && found->is_number_integer() ? found->get<int64_t>() : -1;
}

std::string optimizer_of(const Manifest& manifest) {
  const auto found = manifest.state.find("optimizer");
  return found != manifest.state.end() && found->is_object() ? found->value("type", std::string("?")) : "?";
}

int64_t num_elements(const Manifest& manifest) {
  int64_t sum = 0;
  for (const auto& parameter : manifest.layout.parameters) sum += parameter.numel();
  return sum;
}

size_t num_ranks(const checkpoint::Checkpoint& saved) {
  return static_cast<size_t>(saved.foreign() != nullptr ? saved.foreign()->world_size
                                                        : saved.manifest().world_size());
}

ordered_json to_json(const checkpoint::Checkpoint& saved, const checkpoint::VerifyReport* report) {
  const Manifest& manifest = saved.manifest();
  ordered_json out;
  out["path"] = saved.path().string();
  out["tag"] = manifest.tag;
  out["format_version"] = manifest.version;
  out["global_steps"] = state_number(manifest, "global_steps");
  out["world_size"] = num_ranks(saved);
  out["zero_stage"] = manifest.stage;
  out["optimizer"] = optimizer_of(manifest);
  out["optimizer_states"] = manifest.state_names;
  out["num_parameters"] = num_elements(manifest);
  out["bytes"] = manifest.total_bytes();
  if (const checkpoint::ForeignCheckpoint* const foreign = saved.foreign()) {
    out["format"] = foreign->format;
    out["version"] = foreign->version;
    out["client_state"] = foreign->client_state;
    out["param_groups"] = foreign->groups;
    out["not_read"] = foreign->not_read;
    out["other_states"] = foreign->other_states;
  }
  for (const auto& file : manifest.files)
    out["files"].push_back({{"name", file.name}, {"bytes", file.bytes}});
  for (const auto& parameter : manifest.layout.parameters)
    out["parameters"].push_back({{"name", parameter.name},
                                 {"shape", parameter.shape},
                                 {"dtype", name_of(manifest.layout.units[parameter.unit].dtype)},
                                 {"trainable", manifest.layout.units[parameter.unit].trainable},
                                 {"aliases", parameter.aliases}});
  for (const auto& tensor : manifest.tensors) out["buffers"].push_back(tensor.name);
  if (report)
    out["verified"] = {{"ok", report->ok()},
                       {"blocks", report->num_blocks},
                       {"bytes", report->bytes},
                       {"problems", report->problems}};
  return out;
}

void print(const checkpoint::Checkpoint& saved) {
  const Manifest& manifest = saved.manifest();
  const checkpoint::ForeignCheckpoint* const foreign = saved.foreign();
  std::cout << saved.path().string() << '\n';
  if (foreign != nullptr)
    std::cout << "format      " << foreign->format << (foreign->version.empty() ? "" : " ")
              << foreign->version << '\n';
  std::cout << "step        " << format_count(state_number(manifest, "global_steps")) << '\n'
            << "saved by    " << num_ranks(saved) << (num_ranks(saved) == 1 ? " rank" : " ranks")
            << (foreign != nullptr && !foreign->has_stage() ? "" : str(" at ZeRO stage ", manifest.stage))
            << '\n'
            << "optimizer   " << optimizer_of(manifest)
            << (manifest.state_names.empty() ? "" : ": " + join(manifest.state_names, ", ")) << '\n'
            << "parameters  " << format_count(num_elements(manifest)) << " in "
            << manifest.layout.parameters.size() << " tensors\n"
            << "buffers     " << manifest.tensors.size() << '\n'
            << (foreign != nullptr ? "tensors     " : "on disk     ") << mebibytes(manifest.total_bytes())
            << " in " << (foreign != nullptr ? foreign->files.size() : manifest.files.size()) << " files\n";
  if (foreign != nullptr)
    for (const std::string& line : foreign->not_read) std::cout << "not read    " << shown(line) << '\n';
  if (foreign != nullptr)
    for (const std::string& line : foreign->other_states) std::cout << "other state " << shown(line) << '\n';
  std::cout << '\n';
  size_t width = 0;
  for (const auto& parameter : manifest.layout.parameters)
    width = std::max(width, shown(parameter.name).size());
  for (const auto& parameter : manifest.layout.parameters) {
    const auto& unit = manifest.layout.units[parameter.unit];
    const std::string name = shown(parameter.name);
    std::cout << "  " << name << std::string(width - name.size() + 2, ' ') << name_of(unit.dtype) << "  "
              << describe_shape(parameter.shape) << (unit.trainable ? "" : "  frozen")
              << (parameter.aliases.empty() ? "" : "  tied: " + shown(join(parameter.aliases, ", "))) << '\n';
  }
}

/// Returns the exit code.
int inspect(const InspectFlags& flags, const std::filesystem::path& directory, const std::string& tag) {
  using checkpoint::Checkpoint;
  // Damage first: a checkpoint whose files are short cannot be opened, but its damage can be listed.
  const Checkpoint saved =
      flags.verify ? Checkpoint::open_damaged(directory, tag) : Checkpoint::open(directory, tag);
  std::optional<checkpoint::VerifyReport> report;
  if (flags.verify) report = saved.elements().verify();
  const bool ok = !report || report->ok();
  if (!ok && !std::filesystem::exists(saved.path()))  // on NFS what is open may go as well
    throw CheckpointError(saved.path(), ": was removed while it was read");
  if (flags.json) {
    std::cout << json_text(to_json(saved, report ? &*report : nullptr), 2) << '\n';
  } else if (!ok) {
    for (const std::string& problem : report->problems) std::cout << "damaged: " << shown(problem) << '\n';
  } else {
    print(saved);
    if (report)
      std::cout << "\nverified: " << format_count(report->num_blocks) << " blocks, "
                << mebibytes(report->bytes)
                << (saved.foreign() == nullptr
                        ? ", every hash as saved"
                        : str(", the CRC-32 of ", format_count(report->num_archives), " archives as saved, ",
                              format_count(report->num_nonfinite), " elements that are NaN or infinite"))
                << '\n';
  }
  return ok ? 0 : 1;
}

int inspect(const InspectFlags& flags) {
  if (flags.directory.empty()) throw ConfigError("DIR is empty; expected the folder of the checkpoints");
  const train::RunPath path = train::find_run(flags.directory, flags.tag);
  const Logger log{LogOptions{}};
  int exit_code = 0;
  checkpoint::read_latest_checkpoint(
      path.checkpoints, path.tag, [&](const std::string& line) { log.warning(line); },
      [&](const std::string& tag) { exit_code = inspect(flags, path.checkpoints, tag); });
  return exit_code;
}

}  // namespace

void add_inspect_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("inspect", "Show what a checkpoint holds");
  const auto flags = std::make_shared<InspectFlags>();
  command->add_option("DIR", flags->directory, "Folder of a run, of its checkpoints, or of one of them")
      ->required();
  command->add_option("--tag", flags->tag, "The checkpoint (default: the latest)")->type_name("TAG");
  command->add_flag("--verify", flags->verify, "Read every file and compare it with the hashes of the save");
  command->add_flag("--json", flags->json, "Print JSON");
  command->callback([flags, &exit_code] { exit_code = inspect(*flags); });
}

}  // namespace tessera::tools

// identify(): asks the formats in turn. read_foreign() reads what it finds.
#include <map>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/foreign_checkpoint.h"
#include "checkpoint/foreign/saved_state.h"
#include "checkpoint/formats/torch_file.h"
#include "core/files/disk.h"

namespace tessera::checkpoint {
namespace {

/// A model's own names by the names without wrappers' prefixes, which sources are read with: a model may have
/// a part of its own that is called "module".
std::map<std::string, std::string> own_names(const ParameterOrder& order) {
  std::vector<std::string> names = order.names;
  names.insert(names.end(), order.frozen.begin(), order.frozen.end());
  names.insert(names.end(), order.buffers.begin(), order.buffers.end());
  for (const auto& [name, aliases] : order.aliases) names.insert(names.end(), aliases.begin(), aliases.end());
  const std::vector<std::string> clean = without_wrappers(names);
  std::map<std::string, std::string> own;
  for (size_t i = 0; i < names.size(); ++i) own.emplace(clean[i], names[i]);
  return own;
}

ParameterOrder without_wrappers(const ParameterOrder& order, const std::map<std::string, std::string>& own) {
  std::map<std::string, std::string> clean;
  for (const auto& [name, original] : own) clean.emplace(original, name);
  const auto rename = [&](std::vector<std::string>& names) {
    for (std::string& name : names)
      if (const auto found = clean.find(name); found != clean.end()) name = found->second;
  };
  ParameterOrder out = order;
  rename(out.names);
  rename(out.frozen);
  rename(out.buffers);
  for (std::vector<std::string>& group : out.groups) rename(group);
  out.aliases.clear();
  for (const auto& [name, aliases] : order.aliases) {
    const auto found = clean.find(name);
    std::vector<std::string>& renamed = out.aliases[found == clean.end() ? name : found->second] = aliases;
    rename(renamed);
  }
  return out;
}

/// Names that the model does not have become those of the model that differ by prefixes alone, and that the
/// checkpoint has not besides.
void give_own_names(ForeignCheckpoint& checkpoint, const std::map<std::string, std::string>& own) {
  const std::vector<std::string*> names = names_in(checkpoint);
  std::set<std::string> originals, taken;
  for (const auto& [name, original] : own) originals.insert(original);
  for (const std::string* name : names) taken.insert(*name);
  for (std::string* const name : names) {
    if (originals.contains(*name)) continue;
    const auto found = own.find(*name);
    const std::string original = found != own.end() ? found->second : "module." + *name;
    if (originals.contains(original) && taken.insert(original).second) *name = original;
  }
}

}  // namespace

/// What torch.save has written: only its pickle tells whose it is.
static ForeignCheckpoint read_torch_file(const std::filesystem::path& path, const ParameterOrder& order) {
  if (std::optional<ForeignCheckpoint> found = read_trainer_file(path, order)) return *std::move(found);
  std::optional<IdentifiedCheckpoint> found = identify_deepspeed(path, "");
  if (!found) found = identify_universal(path, "");
  if (!found) found = identify_model(path);
  return found.value().read(order);
}

// Trainers first: their folders have the files of DeepSpeed and DCP, which they read, and more. A universal
// folder is one of DeepSpeed's without the files of ranks. A model last: the folders of trainers have one.
std::optional<IdentifiedCheckpoint> identify(const std::filesystem::path& path, const std::string& tag) try {
  if (!is_there(path)) throw CheckpointError(path, " does not exist; expected a checkpoint's folder or file");
  const std::filesystem::path one = tag.empty() ? path : path / tag;
  if (!is_folder(one) && TorchFile::recognizes(one))
    return IdentifiedCheckpoint{one,
                                [one](const ParameterOrder& order) { return read_torch_file(one, order); }};
  std::optional<IdentifiedCheckpoint> found = identify_trainer(one);
  if (!found) found = identify_deepspeed(path, tag);
  if (!found) found = identify_universal(path, tag);
  if (!found && !tag.empty() && !is_there(one))
    throw CheckpointError(one, " does not exist; expected the checkpoint ", tag, " there");
  if (!found) found = identify_distributed(one);
  if (!found) found = identify_model(one);
  return found;
} catch (const DiskError& error) {
  throw CheckpointError(error.what());
}

ForeignCheckpoint read_foreign(const IdentifiedCheckpoint& identified, const ParameterOrder& given) try {
  const std::map<std::string, std::string> own = own_names(given);
  const ParameterOrder order = without_wrappers(given, own);
  ForeignCheckpoint found = identified.read(order);
  check(found);
  std::set<std::filesystem::path> known;
  for (const ArchivePart& archive : found.archives) known.insert(archive.path);
  for (const std::filesystem::path& file : found.files)
    if (known.insert(file).second && TorchFile::recognizes(file)) found.archives.push_back({.path = file});
  join_tied(found, order.aliases);
  give_own_names(found, own);
  return found;
} catch (const DiskError& error) {
  throw CheckpointError(error.what());
}

std::optional<ForeignCheckpoint> read_weights(const std::filesystem::path& path,
                                              const ParameterOrder& order) try {
  const bool of_folder = is_folder(path);
  const std::string name = path.filename().string();
  std::optional<ForeignCheckpoint> found;
  if (of_folder || name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"))
    found = read_safetensors(path);
  if (!found)
    if (const auto identified = identify(path)) found = read_foreign(*identified, order);
  if (!found && !of_folder) found = read_safetensors(path);
  return found;
} catch (const DiskError& error) {
  throw CheckpointError(error.what());
}

}  // namespace tessera::checkpoint

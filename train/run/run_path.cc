#include "train/run/run_path.h"

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/catalog.h"
#include "core/error.h"
#include "core/files/disk.h"
#include "core/files/temporary_name.h"
#include "train/run/run_directory.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

fs::path parent_of(const fs::path& folder) { return directory_of(named_path(folder)); }

}  // namespace

RunPath find_run(const fs::path& folder, const std::string& tag) {
  if (is_file(folder / checkpoint::kManifestName)) {
    const std::string name = name_of_path(folder);
    if (!tag.empty() && tag != name)
      throw ConfigError("--tag ", tag, ": found the folder of the checkpoint ", name, " beside it, ", folder,
                        "; expected the folder of its run");
    const fs::path checkpoints = parent_of(folder);
    return {parent_of(checkpoints), checkpoints, name};
  }
  // A model's own files may lie beside its checkpoints, its config.json too: Hugging Face's Trainer saves so.
  const bool has_checkpoints = is_file(folder / checkpoint::kLatestName) ||
                               (!tag.empty() && is_file(folder / tag / checkpoint::kManifestName));
  const fs::path inside = folder / kCheckpointsName;
  // A run has files of the same names as a folder of Hugging Face's Trainer. Without checkpoints it may have
  // a model, which is read as another program's.
  const bool is_run = is_file(folder / kRunIdName) && !is_file(folder / kModelName);
  if (!has_checkpoints && !is_folder(inside) && !is_run && checkpoint::is_another_programs(folder, tag))
    return {folder, folder, tag};
  if (!has_checkpoints && (is_file(folder / kConfigName) || is_folder(inside))) return {folder, inside, tag};
  return {is_folder(folder) ? parent_of(folder) : folder, folder, tag};
}

}  // namespace tessera::train

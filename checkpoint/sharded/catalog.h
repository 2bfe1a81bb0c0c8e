// The checkpoints of a directory: lists them, reads which is the latest, deletes old ones.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/files/disk.h"

namespace tessera::checkpoint {

inline constexpr std::string_view kManifestName = "manifest.json";
inline constexpr std::string_view kLatestName = "latest";

/// Throws CheckpointError unless `tag` can name a checkpoint: one folder name of at most 200 bytes of
/// UTF-8, without control characters, and not a name of a file of Tessera.
void check_tag(const std::string& tag);

/// Tags of the folders whose manifest names them, from the oldest save to the newest. Only the first
/// lines of a manifest are read. Throws CheckpointError for a directory that cannot be read, as below.
std::vector<std::string> list_checkpoints(const std::filesystem::path& directory);

/// Whether a folder is, or was to be, a checkpoint of Tessera's: it has a manifest, which need not be
/// readable, or the first rank's file.
bool is_tesseras(const std::filesystem::path& folder);

/// The names of all folders that may be checkpoints, as is_tesseras() says. Sorted.
std::vector<std::string> list_folders(const std::filesystem::path& directory);

/// The tag in DIR/latest; nullopt when there is no such file. Throws CheckpointError when it holds no
/// tag.
std::optional<std::string> read_latest(const std::filesystem::path& directory);

struct KeepLast {
  int num = 1;                       ///< checkpoints to keep, at least 1
  std::vector<std::string> protect;  ///< tags neither counted nor deleted, such as the best checkpoint's
};
/// Is called on rank 0, after a save. Deletes the oldest complete checkpoints beyond `num`, but not the one
/// that `latest` names. Returns the tags deleted. Throws CheckpointError.
std::vector<std::string> keep_last(const std::filesystem::path& directory, const KeepLast& keep,
                                   const Disk& disk);

// The function below is for save().

/// Removes temporary folders and files (core/files/temporary_name.h) of interrupted saves: those that nobody
/// holds. Where locks cannot be seen, no save into the directory may be in progress.
void remove_leftovers(const std::filesystem::path& directory, const Disk& disk);

}  // namespace tessera::checkpoint

// The checkpoints of a directory: which there are, which is the latest, and which may go.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/disk.h"

namespace tessera::checkpoint {

inline constexpr std::string_view kManifestName = "manifest.json";
inline constexpr std::string_view kLatestName = "latest";

/// Local. Throws CheckpointError unless `tag` can name a checkpoint: one folder name of at most 200 bytes of
/// UTF-8, without control characters, and none that Tessera gives to its own files.
void check_tag(const std::string& tag);

/// Local. Tags of folders with a manifest of ours that names them (it is not looked into
/// further), from the oldest save to the newest.
std::vector<std::string> list_checkpoints(const std::filesystem::path& directory);

/// Local. The tag DIR/latest names; nothing when there is no such file. Throws
/// CheckpointError for one that holds no tag.
std::optional<std::string> read_latest(const std::filesystem::path& directory);

struct KeepLast {
  int num = 1;                       ///< checkpoints to keep, at least 1
  std::vector<std::string> protect;  ///< tags that are neither counted nor deleted, such as the best one's
};
/// Local (rank 0, after a save). Deletes the oldest complete checkpoints beyond `num`, never the one `latest`
/// names. Returns the tags deleted. Throws CheckpointError.
std::vector<std::string> keep_last(const std::filesystem::path& directory, const KeepLast& keep,
                                   const Disk& disk);

// For save():

/// Local. Removes temporary folders and files (core/temporary_name.h) of saves that died, by their names
/// alone: locks of other hosts need not be seen; no save into the directory may be under way.
void remove_leftovers(const std::filesystem::path& directory, const Disk& disk);

}  // namespace tessera::checkpoint

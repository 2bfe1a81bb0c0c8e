// The last part of a save, on rank 0, or of a conversion: renames a finished folder to DIR/TAG and updates
// the files that name it, as `latest`, or changes nothing.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "core/files/disk.h"

namespace tessera::checkpoint {

struct Publication {
  std::filesystem::path directory;
  std::string tag;
  std::string temporary;  ///< name of the finished, synced folder within `directory`
  /// Files of `directory` that name it from now on, and what they hold then.
  std::vector<std::pair<std::string, std::string>> pointers;
};

/// The folders that create_directories(directory) would create, innermost first.
std::vector<std::filesystem::path> missing_folders(const std::filesystem::path& directory);

/// Renames the folder and replaces the pointers; when it returns, the checkpoint is
/// committed, and a replaced checkpoint has the folder's old name. On an error it undoes its changes, so that
/// the folder has its old name again, and throws CheckpointError.
void publish(const Publication& publication, const Disk& disk);

}  // namespace tessera::checkpoint

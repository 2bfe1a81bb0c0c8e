// The last part of a save, on rank 0: renames a finished folder to DIR/TAG and updates `latest`, or changes
// nothing.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "core/files/disk.h"

namespace tessera::checkpoint {

struct Publication {
  std::filesystem::path directory;
  std::string tag;
  std::string temporary;  ///< name of the finished, synced folder within `directory`
  bool latest = true;     ///< whether `latest` names it from now on
};

/// The folders that create_directories(directory) would create, innermost first.
std::vector<std::filesystem::path> missing_folders(const std::filesystem::path& directory);

/// Renames the folder and replaces `latest`, if it is to; when it returns, the checkpoint is
/// committed, and a replaced checkpoint has the folder's old name. On an error it undoes its changes, so that
/// the folder has its old name again, and throws CheckpointError.
void publish(const Publication& publication, const Disk& disk);

}  // namespace tessera::checkpoint

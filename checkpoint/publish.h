// The last part of a save, rank 0's alone: a finished folder becomes DIR/TAG and what
// `latest` names, or nothing has changed.
#pragma once

#include <filesystem>
#include <string>

#include "core/disk.h"

namespace tessera::checkpoint {

struct Publication {
  std::filesystem::path directory;
  std::string tag;
  std::string temporary;  ///< name of the finished, synced folder within `directory`
};

/// Local. Renames the folder and replaces `latest`; when it returns, the checkpoint counts, and the
/// folder's old name is that of the checkpoint it replaced, if any. Throws CheckpointError after undoing
/// what it did; the folder then has its old name.
void publish(const Publication& publication, const Disk& disk);

}  // namespace tessera::checkpoint

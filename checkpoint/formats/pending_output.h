// PendingDirectory: a folder of files with a temporary name until it is complete (core/files/pending_file.h
// does the same for one file).
#pragma once

#include <filesystem>

#include "core/files/disk.h"
#include "core/files/temporary_name.h"

namespace tessera::checkpoint {

/// Makes hard links in the folder `to` of the files and folders of `from` whose names `replaced` does not
/// accept; copies, where there can be no links. Throws DiskError.
void keep_other_files(const Disk& disk, const std::filesystem::path& from, const std::filesystem::path& to,
                      bool (*replaced)(const std::string& name));

/// Builds a folder that appears whole or not at all. Owns the temporary one (core/files/temporary_name.h) and
/// removes it unless published. An existing folder of that name is exchanged with the new one in one step;
/// its other files are kept (as hard links), except those that `replaced` accepts. Processes that write one
/// folder at once take turns, and the last one's files remain. Not thread-safe.
class PendingDirectory {
 public:
  /// Creates the temporary folder. Throws DiskError; CheckpointError when `path` is not a folder, or
  /// has subfolders, which cannot be hard-linked.
  PendingDirectory(const Disk& disk, std::filesystem::path path,
                   bool (*replaced)(const std::string& file_name));
  ~PendingDirectory();
  PendingDirectory(const PendingDirectory&) = delete;
  PendingDirectory& operator=(const PendingDirectory&) = delete;

  const std::filesystem::path& temporary() const { return temporary_.path; }
  /// Renames the folder to its name. All its files must be closed. Throws DiskError.
  void publish();

 private:
  void check_entries() const;

  const Disk& disk_;
  std::filesystem::path path_;
  HeldFolder temporary_;
  bool (*replaced_)(const std::string&);
  bool renamed_ = false;
};

}  // namespace tessera::checkpoint

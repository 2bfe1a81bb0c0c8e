// PendingDirectory: a folder of files that has another name until it is whole
// (core/pending_file.h does the same for one file).
#pragma once

#include <filesystem>

#include "core/disk.h"
#include "core/file_descriptor.h"

namespace tessera::checkpoint {

/// A folder being written. Owns the temporary one (core/temporary_name.h) and removes it unless published. A
/// folder that has the name already is exchanged for the new one in one step; its other files are carried
/// over (as hard links), those that `replaced` accepts are not. Not thread-safe.
class PendingDirectory {
 public:
  /// Local. Creates the temporary folder. Throws DiskError; CheckpointError when `path` is no folder or holds
  /// folders of its own, which no single step could carry over.
  PendingDirectory(const Disk& disk, std::filesystem::path path,
                   bool (*replaced)(const std::string& file_name));
  ~PendingDirectory();
  PendingDirectory(const PendingDirectory&) = delete;
  PendingDirectory& operator=(const PendingDirectory&) = delete;

  const std::filesystem::path& temporary() const { return temporary_; }
  /// Local. All files inside have been closed: gives the folder its name. Throws DiskError.
  void publish();

 private:
  void check_entries() const;
  void create();

  const Disk& disk_;
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  FileDescriptor lock_;
  bool (*replaced_)(const std::string&);
  bool renamed_ = false;
};

}  // namespace tessera::checkpoint

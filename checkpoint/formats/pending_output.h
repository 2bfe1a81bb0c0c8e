// Output that has another name until it is whole (core/disk.h: [Note: files that are whole or absent]).
//
// [Note: temporary names]
// A file or folder NAME is written as NAME.PID.tmp beside it, so that two processes never write into one file. What a
// killed process has left is removed by the next one that writes NAME: its PID is not alive any more.
#pragma once

#include <filesystem>

#include "core/disk.h"

namespace tessera::checkpoint {

/// A file being written. Owns the temporary file and removes it unless published. Not thread-safe.
class PendingFile {
 public:
  /// Local. Creates the temporary file. `disk` must outlive this. Throws DiskError.
  PendingFile(const Disk& disk, std::filesystem::path path);
  ~PendingFile();
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  OutputFile& file() { return file_; }
  const std::filesystem::path& path() const { return path_; }
  const std::filesystem::path& temporary() const { return temporary_; }
  /// Local. Syncs, renames, syncs the directory; to be called once. Throws DiskError.
  void publish();

 private:
  const Disk& disk_;
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  OutputFile file_;
  bool renamed_ = false;
};

/// The same for a folder of files. A folder that has the name already is exchanged for the new one in one step; its other
/// files are carried over (as hard links), those that `replaced` accepts are not.
class PendingDirectory {
 public:
  /// Local. Creates the temporary folder. Throws DiskError; CheckpointError when `path` is no folder or holds folders of
  /// its own, which no single step could carry over.
  PendingDirectory(const Disk& disk, std::filesystem::path path, bool (*replaced)(const std::string& file_name));
  ~PendingDirectory();
  PendingDirectory(const PendingDirectory&) = delete;
  PendingDirectory& operator=(const PendingDirectory&) = delete;

  const std::filesystem::path& temporary() const { return temporary_; }
  /// Local. All files inside have been closed: gives the folder its name. Throws DiskError.
  void publish();

 private:
  void check_entries() const;

  const Disk& disk_;
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  bool (*replaced_)(const std::string&);
  bool renamed_ = false;
};

}  // namespace tessera::checkpoint

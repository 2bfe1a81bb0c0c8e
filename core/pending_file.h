// PendingFile: a file that has another name until it is whole (core/disk.h:
// [Note: files that are whole or absent]).
#pragma once

#include <filesystem>

#include "core/disk.h"
#include "core/file_descriptor.h"

namespace tessera {

/// A file being written. Owns the temporary file and removes it unless published. Not thread-safe.
class PendingFile {
 public:
  /// Local. Removes what killed processes have left of it, and creates the temporary file
  /// (core/temporary_name.h). `disk` must outlive this. Throws DiskError, for a name that a folder has, too.
  PendingFile(const Disk& disk, std::filesystem::path path);
  ~PendingFile();
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  OutputFile& file() { return file_; }
  const std::filesystem::path& path() const { return path_; }
  const std::filesystem::path& temporary() const { return file_.path(); }
  /// Local. Syncs, renames, syncs the directory; to be called once. Throws DiskError.
  void publish();

 private:
  static OutputFile create(const Disk& disk, const std::filesystem::path& path, FileDescriptor& lock);

  const Disk& disk_;
  std::filesystem::path path_;
  FileDescriptor lock_;  // a copy of the file's, which is closed before it has its name
  OutputFile file_;
  bool renamed_ = false;
};

/// Local. For destructors and handlers: what cannot be removed stays, and the failure
/// that led there is the one to report.
void remove_quietly(const Disk& disk, const std::filesystem::path& path) noexcept;

}  // namespace tessera

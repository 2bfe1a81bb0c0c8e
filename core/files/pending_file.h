// PendingFile: a file with a temporary name until it is complete (see core/files/disk.h).
#pragma once

#include <filesystem>

#include "core/files/disk.h"
#include "core/files/file_descriptor.h"

namespace tessera {

/// Writes a file that appears whole or not at all. Owns the temporary file and removes it unless published.
/// Not thread-safe.
class PendingFile {
 public:
  /// Removes temporary files of it that killed processes left, and creates a new one
  /// (core/files/temporary_name.h). `disk` must outlive this object. Throws DiskError, also when the name is
  /// a folder.
  PendingFile(const Disk& disk, std::filesystem::path path);
  ~PendingFile();
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  OutputFile& file() { return file_; }
  const std::filesystem::path& path() const { return path_; }
  const std::filesystem::path& temporary() const { return file_.path(); }
  /// Syncs, renames, syncs the directory. Call it once. Throws DiskError.
  void publish();

 private:
  static OutputFile create(const Disk& disk, const std::filesystem::path& path, FileDescriptor& lock);

  const Disk& disk_;
  std::filesystem::path path_;
  FileDescriptor lock_;  // a duplicate descriptor, because the file is closed before the rename
  OutputFile file_;
  bool renamed_ = false;
};

/// Is for destructors and exception handlers. Ignores errors, because the first error is the one to report.
void remove_quietly(const Disk& disk, const std::filesystem::path& path) noexcept;

}  // namespace tessera

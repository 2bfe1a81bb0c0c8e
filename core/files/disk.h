// Disk: file operations that can be tested: each can be made to fail, or be the last before a crash.
//
// A file that others read is written under a temporary name in the same directory
// (core/files/pending_file.h), synced and renamed, and its directory is synced. rename is atomic, so a crash
// leaves the old file or the new one. Every operation goes through a Disk, which can skip the syncs (they
// cost time, and protect against power loss only) and calls a probe after each operation. Tests kill the
// process or fail the operation at each of them, and replay what a power loss would leave.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/files/disk_error.h"
#include "core/files/file_descriptor.h"
#include "core/files/input_file.h"

namespace tessera {

struct DiskOptions {
  bool sync = true;  ///< false: fsync is skipped
  /// Called after each operation with its name ("create", "write", "sync", "rename", …) and path; an
  /// exception it throws is treated as a failure of the operation.
  std::function<void(std::string_view operation, const std::filesystem::path& path)> probe;
};

class Disk;

/// Writes a file. Owns its descriptor. The content is undefined until close() returns. Not thread-safe.
class OutputFile {
 public:
  OutputFile(OutputFile&& other) noexcept = default;
  OutputFile& operator=(OutputFile&&) = delete;

  /// Reserves disk space for the first `bytes` bytes and sets the file length, so that a full disk is
  /// reported here.
  void reserve(int64_t bytes);
  /// Writes all of `data` at byte `offset`.
  void write_at(int64_t offset, std::span<const std::byte> data);
  /// Writes all of `data` after the data of earlier append() calls.
  void append(std::span<const std::byte> data);
  void append(std::string_view text) { append(std::as_bytes(std::span(text))); }
  /// If close() will sync: starts writing these bytes to the device, so that close() waits less. Does
  /// not wait.
  void start_sync(int64_t offset, int64_t bytes);
  /// Syncs (unless the Disk skips it) and closes. Call it once.
  void close();

  int64_t appended() const { return appended_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  friend class Disk;
  friend class PendingFile;
  OutputFile(const Disk& disk, std::filesystem::path path, FileDescriptor descriptor);

  const Disk* disk_;
  std::filesystem::path path_;
  FileDescriptor descriptor_;
  int64_t appended_ = 0;
};

/// Carries out operations on files and folders. Members throw DiskError. Thread-safe if the probe is. Must
/// outlive its OutputFiles.
class Disk {
 public:
  explicit Disk(DiskOptions options = {}) : options_(std::move(options)) {}
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  /// Creates an empty file with the permissions that the umask allows. Fails when the name exists, also as a
  /// symbolic link, so that no existing file is written to.
  OutputFile create(const std::filesystem::path& path) const;
  /// Also creates parents; no error when it exists.
  void create_directories(const std::filesystem::path& path) const;
  /// Creates no parents: it is an error when the parent does not exist, and none when the directory exists.
  void create_directory(const std::filesystem::path& path) const;
  /// Replaces `to` when that is a file.
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) const;
  /// Swaps two names in one step; where there is none (NFS, Lustre) in three, by way of b.replaced-DIGITS.
  void exchange(const std::filesystem::path& a, const std::filesystem::path& b) const;
  /// Creates a hard link in the same file system (to a symbolic link itself, not to its target).
  void link(const std::filesystem::path& from, const std::filesystem::path& to) const;
  /// A file, or a directory with its contents; no error when it does not exist.
  void remove_all(const std::filesystem::path& path) const;
  /// Syncs the directory entries.
  void sync_directory(const std::filesystem::path& path) const;
  /// Writes a small file atomically, as a PendingFile.
  void replace_file(const std::filesystem::path& path, std::string_view content) const;

 private:
  friend class OutputFile;
  void done(std::string_view operation, const std::filesystem::path& path) const {
    if (options_.probe) options_.probe(operation, path);
  }

  DiskOptions options_;
};

/// Whether there is something of this path, a folder, a file. False where that cannot be told.
bool is_there(const std::filesystem::path& path);
bool is_folder(const std::filesystem::path& path);
bool is_file(const std::filesystem::path& path);

/// What is in a folder, sorted; nothing where it does not exist. Throws DiskError.
std::vector<std::filesystem::path> paths_in(const std::filesystem::path& folder);

/// Writes a small file atomically, but does not sync it: a power loss may remove it. Throws DiskError.
void replace_file(const std::filesystem::path& path, std::string_view content);

}  // namespace tessera

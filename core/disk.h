// Disk: the file operations a result on disk depends on, each of which can fail
// and each of which a crash can follow.
//
// [Note: files that are whole or absent]
// A file others will read is written under a temporary name in the same directory (core/pending_file.h),
// synced, renamed, and its directory synced; rename is atomic, so a crash leaves the old file or the new one.
// Every operation goes through a Disk, which can skip the syncs (they cost time, and protect against power
// loss only) and calls a probe after each: tests kill the process, or fail the operation, at every single one
// of them, and replay what a power loss would leave.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "core/disk_error.h"
#include "core/file_descriptor.h"
#include "core/input_file.h"

namespace tessera {

struct DiskOptions {
  bool sync = true;  ///< false: fsync is skipped
  /// Called after each operation with its name ("create", "write", "sync", "rename", …) and path; what it
  /// throws is passed on as if the operation had failed.
  std::function<void(std::string_view operation, const std::filesystem::path& path)> probe;
};

class Disk;

/// A file being written. Owns its descriptor; unless closed, its content is in
/// an unknown state. Not thread-safe.
class OutputFile {
 public:
  OutputFile(OutputFile&& other) noexcept = default;
  OutputFile& operator=(OutputFile&&) = delete;

  /// Local. Reserves room for the first `bytes` bytes and makes the file that long,
  /// so that a full disk is noticed here.
  void reserve(int64_t bytes);
  /// Local. Writes all of `data` at byte `offset`.
  void write_at(int64_t offset, std::span<const std::byte> data);
  /// Local. Writes all of `data` behind what append() wrote before.
  void append(std::span<const std::byte> data);
  void append(std::string_view text) { append(std::as_bytes(std::span(text))); }
  /// Local. Where close() will sync: has the device start on these bytes now, so that
  /// close() waits less. Waits for nothing.
  void start_sync(int64_t offset, int64_t bytes);
  /// Local. Syncs (unless the Disk skips that) and closes; to be called once.
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

/// All members are local and throw DiskError. Thread-safe as far as the probe
/// is. Must outlive its OutputFiles.
class Disk {
 public:
  explicit Disk(DiskOptions options = {}) : options_(std::move(options)) {}
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  /// A new, empty file, readable and writable as the umask allows. Fails where the name is taken, be it by a
  /// symbolic link: nothing that was there is ever written into.
  OutputFile create(const std::filesystem::path& path) const;
  /// Opens an existing file to write more into it.
  OutputFile reopen(const std::filesystem::path& path) const;
  /// With its parents; not an error when it is there.
  void create_directories(const std::filesystem::path& path) const;
  /// Replaces `to` when that is a file.
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) const;
  /// Swaps two names in one step (RENAME_EXCHANGE).
  void exchange(const std::filesystem::path& a, const std::filesystem::path& b) const;
  /// Gives a file a second name in the same file system (a hard link; of a symbolic link, a second one).
  void link(const std::filesystem::path& from, const std::filesystem::path& to) const;
  /// A file or a whole directory; not an error when it is absent.
  void remove_all(const std::filesystem::path& path) const;
  /// Makes the names in a directory durable.
  void sync_directory(const std::filesystem::path& path) const;
  /// Writes a small file whole-or-absent, as a PendingFile.
  void replace_file(const std::filesystem::path& path, std::string_view content) const;

 private:
  friend class OutputFile;
  void done(std::string_view operation, const std::filesystem::path& path) const {
    if (options_.probe) options_.probe(operation, path);
  }

  DiskOptions options_;
};

/// Local. Writes a small file whole-or-absent, but not synced: what only a power
/// failure could take. Throws DiskError.
void replace_file(const std::filesystem::path& path, std::string_view content);

}  // namespace tessera

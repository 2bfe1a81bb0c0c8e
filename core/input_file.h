// Opening files that others have written. Every reader of the project opens its
// files here, or asks here first.
//
// [Note: inputs are regular files]
// open() of a FIFO waits for a writer, and a read of a terminal or socket for its other end, for ever;
// /dev/zero has no end. So a file is opened without blocking, and refused with one line when it is not a
// regular file. Reading a regular file does not block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "core/disk_error.h"
#include "core/file_descriptor.h"

namespace tessera {

/// Local. Opens a regular file for reading; waits for nothing. Throws DiskError: "cannot open PATH: No such
/// file or directory", "cannot read PATH: it is a FIFO and not a regular file".
FileDescriptor open_input(const std::filesystem::path& path);

/// Local. For libraries that open a file by its name themselves: throws as open_input() does.
void check_input(const std::filesystem::path& path);

/// A file being read. Thread-safe.
class InputFile {
 public:
  /// Throws as open_input().
  explicit InputFile(std::filesystem::path path);
  InputFile(InputFile&& other) noexcept = default;
  InputFile& operator=(InputFile&&) = delete;

  int64_t bytes() const { return bytes_; }
  const std::filesystem::path& path() const { return path_; }
  /// Local. Fills `data` from byte `offset` on. Throws DiskError when the file ends before.
  void read_at(int64_t offset, std::span<std::byte> data) const;
  /// Local. Fills as much of `data` from byte `offset` on as the file has;
  /// returns the bytes. Throws DiskError.
  size_t read_some(int64_t offset, std::span<std::byte> data) const;
  /// Local. The whole file, which must not be longer than `limit` bytes.
  std::string read_all(int64_t limit = INT64_MAX) const;

 private:
  std::filesystem::path path_;
  FileDescriptor descriptor_;
  int64_t bytes_ = 0;
};

/// Local. All of a file with data of a user. Throws DataError: "PATH: cannot be
/// read: REASON; expected EXPECTED".
std::string read_data_file(const std::filesystem::path& path, const std::string& expected);

}  // namespace tessera

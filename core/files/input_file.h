// InputFile: opens and reads files written by other programs. Every reader of the project opens its files
// here.
//
// Inputs are regular files.
// open() of a FIFO blocks until there is a writer, a read of a terminal or socket blocks until there is data,
// and /dev/zero has no end. So a file is opened without blocking, and refused when it is not a regular file.
// Reading a regular file does not block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "core/files/disk_error.h"
#include "core/files/file_descriptor.h"

namespace tessera {

/// Opens a regular file for reading, without blocking. Throws DiskError: "cannot open PATH: No such
/// file or directory", "cannot read PATH: it is a FIFO and not a regular file".
FileDescriptor open_input(const std::filesystem::path& path);

/// Reads a file. Thread-safe.
class InputFile {
 public:
  /// Throws as open_input().
  explicit InputFile(std::filesystem::path path);
  InputFile(InputFile&& other) noexcept = default;
  InputFile& operator=(InputFile&&) = delete;

  int64_t bytes() const { return bytes_; }
  const std::filesystem::path& path() const { return path_; }
  /// Fills `data` from byte `offset`. Throws DiskError when the file ends earlier.
  void read_at(int64_t offset, std::span<std::byte> data) const;
  /// Reads up to data.size() bytes from byte `offset`; returns the number read. Throws DiskError.
  size_t read_some(int64_t offset, std::span<std::byte> data) const;
  /// The whole file, which must not be longer than `limit` bytes.
  std::string read_all(int64_t limit = INT64_MAX) const;

 private:
  std::filesystem::path path_;
  FileDescriptor descriptor_;
  int64_t bytes_ = 0;
};

/// Reads a whole data file. Throws DataError: "PATH: cannot be
/// read: REASON; expected EXPECTED".
std::string read_data_file(const std::filesystem::path& path, const std::string& expected);

}  // namespace tessera

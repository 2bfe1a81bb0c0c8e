// MappedFile: a file mapped into memory, read-only. All processes of a host that map it share the pages of
// the page cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

namespace tessera {

/// Maps a file into memory. Owns the mapping. Immutable; thread-safe. The file must not be truncated while it
/// is mapped.
class MappedFile {
 public:
  /// Throws DataError: the file cannot be opened or mapped.
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::byte* data() const { return data_; }  ///< null for an empty file
  int64_t bytes() const { return bytes_; }

 private:
  const std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace tessera

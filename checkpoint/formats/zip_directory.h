// Reads the directory of a zip archive. Files are
// untrusted: everything is checked.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera::checkpoint {

struct ZipEntry {
  std::string name;
  int64_t header_offset = 0;
  int64_t offset = 0;  ///< of the data, from the start of the file
  int64_t bytes = 0;   ///< in the file
  uint32_t crc = 0;    ///< CRC-32 as zlib computes it, of the data before it was compressed
  int method = 0;      ///< of compression; 0: none
};

/// Gives `bytes` bytes of a file from byte `offset` on, which lie within the size that it had when it was
/// opened. Throws DiskError where it has been cut since.
using ReadBytes = std::function<std::string(int64_t offset, int64_t bytes)>;

/// The entries by their place in the file, which no two share. Throws CheckpointError naming `source` and the
/// entry: no archive, cut off, bytes after its end, encrypted entries, a directory that its
/// entries' own headers contradict, two entries of one name, names that lead out of the archive, entries that
/// overlap or lie outside; and what `read` throws.
std::vector<ZipEntry> read_zip_directory(int64_t file_bytes, const ReadBytes& read,
                                         const std::string& source);

/// Compares the bytes of an entry that is not compressed with its CRC-32. Throws CheckpointError, and what
/// `read` throws.
void check_zip_entry(const ReadBytes& read, const ZipEntry& entry, const std::string& source);

}  // namespace tessera::checkpoint

// Reads the directory of a zip archive. Files are
// untrusted: everything is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
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

/// The entries by their place in the file, which no two share. Throws CheckpointError naming `source` and the
/// entry: no archive, cut off, bytes after its end, encrypted entries, a directory that its
/// entries' own headers contradict, two entries of one name, names that lead out of the archive, entries that
/// overlap or lie outside.
std::vector<ZipEntry> read_zip_directory(std::span<const std::byte> file, const std::string& source);

/// Compares the bytes of an entry that is not compressed with its CRC-32. Throws CheckpointError.
void check_zip_entry(std::span<const std::byte> file, const ZipEntry& entry, const std::string& source);

}  // namespace tessera::checkpoint

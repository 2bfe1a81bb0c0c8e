// TorchArchive: the zip archive that torch.save writes: a pickle, and the storages of its tensors. It may be
// a whole file, or a part of one (torch.distributed.checkpoint has many in a file).
//
// Torch's zip: entries are not compressed, and their data is at multiples of 64 bytes.
// The archive (PKWARE's APPNOTE.TXT 6.3.10) is byte for byte as torch writes it, because torch.load can be
// set to compute the offsets of the data instead of reading every local header
// (torch.utils.serialization.config.load. calculate_storage_offsets): sizes and CRC-32 in a data descriptor
// after the data (24 bytes where the entry needs zip64, else 16; none behind an empty entry), a local zip64
// field from 4 GiB on that holds the header's offset too, and then a field "FB" whose length aligns the data.
// The end of central directory is always written in zip64 as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/files/disk.h"

namespace tessera::checkpoint {

/// Computes offsets and headers; writes nothing. Sizes are known before the data, CRCs after it. Not
/// thread-safe.
class TorchZip {
 public:
  struct Entry {
    std::string name;  ///< with the folder that all are in: "archive/data/0"
    int64_t bytes = 0;
    int64_t header_offset = 0;
    int64_t data_offset = 0;  ///< a multiple of 64
  };

  /// The archive starts at byte `first_offset` of the file.
  explicit TorchZip(int64_t first_offset = 0) : first_offset_(first_offset) {}

  /// Places an entry after the others; returns its index. `name`: "data.pkl", at most 60,000 bytes.
  size_t add(const std::string& name, int64_t bytes);
  const std::vector<Entry>& entries() const { return entries_; }
  /// First byte after an entry's data.
  int64_t data_end(size_t index) const { return entries_[index].data_offset + entries_[index].bytes; }

  /// The bytes between the data of entry `index` - 1, which has this CRC-32, and that of entry
  /// `index`.
  std::string between(size_t index, uint32_t previous_crc) const;
  /// The bytes after the data of the last entry. CRC-32s by entry, as zlib computes them.
  std::string tail(const std::vector<uint32_t>& crcs) const;
  /// Length of the file, including the tail.
  int64_t file_bytes() const;

 private:
  std::string descriptor(const Entry& entry, uint32_t crc) const;
  std::string local_header(const Entry& entry) const;
  std::string central_header(const Entry& entry, uint32_t crc) const;

  int64_t first_offset_;
  std::vector<Entry> entries_;
};

/// Lays out archive/data.pkl (the pickle), .format_version, .storage_alignment, byteorder, data/0, data/1, …,
/// version, and writes them at their places. Source: torch/serialization.py of torch 2.11.
/// Not thread-safe.
class TorchArchive {
 public:
  /// `storages`: the bytes of each.
  TorchArchive(std::string pickle, const std::vector<int64_t>& storages);

  /// All of the archive.
  int64_t bytes() const { return zip_.file_bytes(); }
  /// Writes bytes of a storage, which come in order. The archive begins at byte `base` of the file.
  void write(OutputFile& file, int64_t base, size_t storage, int64_t offset, std::span<const std::byte> data);
  /// Writes the rest, when all storages are written.
  void finish(OutputFile& file, int64_t base);

 private:
  static constexpr std::string_view kVersion = "3\n";

  void write_text(OutputFile& file, int64_t base, size_t entry, std::string_view text);

  std::vector<std::pair<std::string, std::string>> texts_;  // the entries before the storages
  TorchZip zip_;
  std::vector<uint32_t> crcs_;  // by entry
};

}  // namespace tessera::checkpoint

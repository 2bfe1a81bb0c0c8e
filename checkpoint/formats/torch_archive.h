// TorchArchive: the zip archive that torch.save writes: a pickle, and the storages of its tensors. It may be
// a whole file, or a part of one (torch.distributed.checkpoint has many in a file).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/formats/torch_zip.h"
#include "core/files/disk.h"

namespace tessera::checkpoint {

/// Lays out archive/data.pkl (the pickle), .format_version, .storage_alignment, byteorder, data/0, data/1, …,
/// version, and writes them at their places (see torch_zip.h). Source: torch/serialization.py of torch 2.11.
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

// Reads one safetensors file. Files are untrusted: everything is checked.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/formats/safetensors_digest.h"
#include "checkpoint/formats/safetensors_header.h"
#include "core/files/disk.h"

namespace tessera::checkpoint {

/// Reads one file. Immutable; thread-safe.
class SafetensorsFile {
 public:
  /// Opens the file and checks the whole header, so that every tensor in tensors() can be read. If the
  /// file has hashes (safetensors_digest.h), the header is verified. Throws CheckpointError and DiskError,
  /// naming the file (and tensor).
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return input_.path(); }
  /// Sorted by offset, which is from the start of the file.
  const std::vector<SafetensorsTensor>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  /// nullptr when there is none.
  const SafetensorsTensor* find(std::string_view name) const;
  /// Fills `destination` from byte `begin` of a tensor of this file on. If the file has hashes, every
  /// block touched is read whole and verified: throws CheckpointError naming file, tensor and block. Throws
  /// DiskError when the file has become shorter, std::logic_error for a range outside of the tensor.
  void read(const SafetensorsTensor& tensor, int64_t begin, std::span<std::byte> destination) const;
  bool has_hashes() const { return hashes_.has_value(); }
  /// read() by the byte of the file; the range must lie within one tensor.
  void read_at(int64_t offset, std::span<std::byte> destination) const;

 private:
  void read_block(const SafetensorsTensor& tensor, int64_t block, std::span<std::byte> into) const;

  InputFile input_;
  std::optional<SafetensorsHashes> hashes_;
  SafetensorsHeader header_;
  std::map<std::string_view, const SafetensorsTensor*> by_name_;
};

}  // namespace tessera::checkpoint

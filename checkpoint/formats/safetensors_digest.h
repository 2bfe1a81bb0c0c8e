// Hashes in a safetensors file's metadata, with which our reader detects damage. Other readers ignore them.
//
// Hashes in safetensors.
// __metadata__ of a file that Tessera writes has two entries:
//
//   "tessera_blocks"  XXH3-64 (seed 0) of each 1 MiB of each tensor's bytes, of which the last block of a
//                     tensor may be shorter; tensors in the order of their data; 16 lower-case hexadecimal
//                     digits per hash, concatenated
//   "tessera_digest"  XXH3-128 (seed 0) of the head (the 8 bytes of the header's length and the header), with
//                     these 32 digits replaced by zeros
//
// So every bit of the file is covered, and a reader of a part verifies only the blocks it reads. The writer,
// which writes tensors by position, needs only each tensor's own bytes in their order; it first writes the
// head with zeros in place of the hashes. A file without the two entries is read without verification.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/formats/safetensors_header.h"

namespace tessera::checkpoint {

/// Adds both entries, with zeros as hashes, to a header whose tensors have offsets.
void reserve_digest(SafetensorsHeader& header);

/// Writes the hashes of all blocks, in the order of the tensors' data, and the digest over the zeros
/// that reserve_digest put into `head`.
void fill_digest(std::string& head, const std::vector<uint64_t>& block_hashes);

/// Gives the hashes in a file's metadata, by tensor. Immutable.
class SafetensorsHashes {
 public:
  /// `head` is the file's bytes up to the data, `header` what was read from it. nullopt for a file
  /// without hashes. Throws CheckpointError naming `file` when the head does not match its digest, or one of
  /// the two entries is missing or malformed.
  static std::optional<SafetensorsHashes> read(std::string_view head, const SafetensorsHeader& header,
                                               const std::string& file);

  /// The hash of block `block` of header.tensors[index].
  uint64_t expected(size_t index, int64_t block) const {
    return hashes_[static_cast<size_t>(first_block_[index] + block)];
  }

 private:
  std::vector<uint64_t> hashes_;
  std::vector<int64_t> first_block_;  // by tensor
};

}  // namespace tessera::checkpoint

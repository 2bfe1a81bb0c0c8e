// Hashes in a safetensors file's metadata, by which our reader notices damage.
// Other readers pass metadata by.
//
// [Note: hashes in safetensors]
// __metadata__ of a file that Tessera writes has two entries:
//
//   "tessera_blocks"  XXH3-64 (seed 0) of each 1 MiB of each tensor's bytes, the last block of a tensor being
//   as long as it is; the tensors in
//                     the order of their data; 16 lower-case hexadecimal digits a hash, one after the other
//   "tessera_digest"  XXH3-128 (seed 0) of the head (the 8 bytes of the header's length and the header), in
//   which these 32 digits
//                     themselves are taken as zeros
//
// So every bit of the file is covered, whoever reads a part verifies just the blocks it touches, and the
// writer, which writes tensors by position, needs nothing but each tensor's own bytes in their order. The
// places in the head are reserved with zeros. A file without the two entries is read as it is.
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

/// Local. Adds both entries to a header whose tensors have their places, the hashes being zeros.
void reserve_digest(SafetensorsHeader& header);

/// Local. Puts the hashes of all blocks, in the order of the tensors' data, and the digest into the
/// places of `head` that reserve_digest made.
void fill_digest(std::string& head, const std::vector<uint64_t>& block_hashes);

/// The hashes a file came with, by tensor. Immutable.
class SafetensorsHashes {
 public:
  /// Local. `head` is the file's bytes up to the data, `header` what was read from it. Nothing for a file
  /// without hashes. Throws CheckpointError naming `file` when the head is not the one that was written, or
  /// one of the two entries is missing or of another form.
  static std::optional<SafetensorsHashes> read(std::string_view head, const SafetensorsHeader& header,
                                               const std::string& file);

  /// Local. The hash of block `block` of the tensor that is `index` in header.tensors.
  uint64_t expected(size_t index, int64_t block) const {
    return hashes_[static_cast<size_t>(first_block_[index] + block)];
  }

 private:
  std::vector<uint64_t> hashes_;
  std::vector<int64_t> first_block_;  // by tensor
};

}  // namespace tessera::checkpoint

// Hashes of a file's blocks: XXH3-64 (seed 0) of each 1 MiB of its bytes, the last block which may be
// shorter. With one hash per block, a reader of a part verifies only the blocks it reads.
//
// Source: xxHash, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
// (XXH3). It detects damage, not forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::checkpoint {

inline constexpr int64_t kBlockBytes = int64_t{1} << 20;

uint64_t hash_block(std::span<const std::byte> block);

/// Blocks of a file of `bytes` bytes.
constexpr int64_t num_blocks(int64_t bytes) { return bytes / kBlockBytes + (bytes % kBlockBytes != 0); }

/// XXH3-128 of `text`, 32 lower-case hexadecimal digits.
std::string text_digest(std::string_view text);

/// 16 lower-case hexadecimal digits per hash, concatenated.
std::string hashes_to_hex(std::span<const uint64_t> hashes);
/// The inverse; nullopt unless every character is such a digit and their number is a multiple of 16.
std::optional<std::vector<uint64_t>> hashes_from_hex(std::string_view hex);

/// Hashes a file block by block. Takes a file's bytes from first to last, in pieces of any size. Not
/// thread-safe.
class BlockHasher {
 public:
  BlockHasher();
  BlockHasher(const BlockHasher&) = delete;
  BlockHasher& operator=(const BlockHasher&) = delete;
  ~BlockHasher();

  void update(std::span<const std::byte> bytes);
  int64_t bytes() const { return bytes_; }
  /// Ends the last block. Call it once, last.
  std::vector<uint64_t> finish();

 private:
  struct State;
  std::unique_ptr<State> state_;  // of the current block
  int64_t bytes_ = 0;
  std::vector<uint64_t> hashes_;
};

}  // namespace tessera::checkpoint

#include "checkpoint/block_hashes.h"

#include <xxhash.h>

#include <algorithm>
#include <utility>

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kDigits = "0123456789abcdef";

void append_hex(uint64_t value, std::string& text) {
  for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[(value >> shift) & 15];
}

}  // namespace

uint64_t hash_block(std::span<const std::byte> block) { return XXH3_64bits(block.data(), block.size()); }

std::string text_digest(std::string_view text) {
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  std::string hex;
  append_hex(hash.high64, hex);
  append_hex(hash.low64, hex);
  return hex;
}

std::string hashes_to_hex(std::span<const uint64_t> hashes) {
  std::string hex;
  hex.reserve(hashes.size() * 16);
  for (uint64_t hash : hashes) append_hex(hash, hex);
  return hex;
}

std::optional<std::vector<uint64_t>> hashes_from_hex(std::string_view hex) {
  if (hex.size() % 16 != 0) return std::nullopt;
  std::vector<uint64_t> hashes(hex.size() / 16);
  for (size_t i = 0; i < hex.size(); ++i) {
    const size_t digit = kDigits.find(hex[i]);
    if (digit == std::string_view::npos) return std::nullopt;
    hashes[i / 16] = hashes[i / 16] << 4 | digit;
  }
  return hashes;
}

struct BlockHasher::State {
  XXH3_state_t xxh3;
  int64_t bytes = 0;  // of the current block, so far
};

BlockHasher::BlockHasher() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh3); }
BlockHasher::~BlockHasher() = default;

void BlockHasher::update(std::span<const std::byte> bytes) {
  bytes_ += static_cast<int64_t>(bytes.size());
  while (!bytes.empty()) {
    const auto room = static_cast<size_t>(kBlockBytes - state_->bytes);
    const std::span<const std::byte> piece = bytes.first(std::min(bytes.size(), room));
    if (piece.size() == static_cast<size_t>(kBlockBytes)) {
      hashes_.push_back(hash_block(piece));
    } else {
      XXH3_64bits_update(&state_->xxh3, piece.data(), piece.size());
      state_->bytes += static_cast<int64_t>(piece.size());
      if (state_->bytes == kBlockBytes) {
        hashes_.push_back(XXH3_64bits_digest(&state_->xxh3));
        XXH3_64bits_reset(&state_->xxh3);
        state_->bytes = 0;
      }
    }
    bytes = bytes.subspan(piece.size());
  }
}

std::vector<uint64_t> BlockHasher::finish() {
  if (state_->bytes > 0) hashes_.push_back(XXH3_64bits_digest(&state_->xxh3));
  state_->bytes = 0;
  return std::move(hashes_);
}

}  // namespace tessera::checkpoint

// EncodedTexts: the token ids of many texts in one buffer, and padded batches of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::examples {

/// A batch of texts, padded to one length.
struct PaddedTexts {
  at::Tensor input_ids;       ///< (B, T) int64
  at::Tensor attention_mask;  ///< (B, T) bool: false for padding
};

/// Owns 4 bytes per token and 8 per text. Const members are thread-safe.
class EncodedTexts {
 public:
  void add(std::span<const int32_t> ids);

  int64_t size() const { return static_cast<int64_t>(ends_.size()); }
  int64_t num_tokens() const { return static_cast<int64_t>(ids_.size()); }
  std::span<const int32_t> operator[](int64_t index) const;

  /// The texts with these indices, padded with `pad` to the length of the longest, rounded up to a
  /// multiple of 8 but at most `max_length`. No text may be longer than `max_length`.
  PaddedTexts batch(const std::vector<int64_t>& indices, int32_t pad, int64_t max_length) const;

 private:
  std::vector<int32_t> ids_;
  std::vector<int64_t> ends_;  // in ids_
};

}  // namespace tessera::examples

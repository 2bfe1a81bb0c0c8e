// EncodedTexts: token numbers of many texts, in one buffer; and batches of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::examples {

/// Texts side by side as one tensor.
struct PaddedTexts {
  at::Tensor input_ids;       ///< (B, T) int64
  at::Tensor attention_mask;  ///< (B, T) bool: false for padding
};

/// Owns 4 bytes a token and 8 a text. Reading it is thread-safe.
class EncodedTexts {
 public:
  void add(std::span<const int32_t> ids);

  int64_t size() const { return static_cast<int64_t>(ends_.size()); }
  int64_t num_tokens() const { return static_cast<int64_t>(ids_.size()); }
  std::span<const int32_t> operator[](int64_t index) const;

  /// Local. The texts of these numbers, filled up with `pad` to the longest of them, rounded up to a multiple
  /// of 8, at most `max_length`, which no text exceeds.
  PaddedTexts batch(const std::vector<int64_t>& indices, int32_t pad, int64_t max_length) const;

 private:
  std::vector<int32_t> ids_;
  std::vector<int64_t> ends_;  // in ids_
};

}  // namespace tessera::examples

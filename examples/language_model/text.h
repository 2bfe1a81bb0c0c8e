// A text file as samples for a language model: every byte is a token, the text
// is cut into windows that don't overlap.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::examples {

/// Owns a mapping of the file: ranks on one host share its bytes. The file must not shrink meanwhile.
class ByteText {
 public:
  /// Local. Windows of `sequence` bytes and the byte after. Throws DataError: the file
  /// cannot be read, or has not one window.
  ByteText(const std::string& path, int64_t sequence);

  int64_t num_windows() const { return (bytes_.numel() - 1) / sequence_; }
  /// Local. (B, sequence + 1) int64: the windows of these numbers, with the byte that follows each.
  at::Tensor windows(const std::vector<int64_t>& numbers) const;

 private:
  int64_t sequence_;
  at::Tensor bytes_;  // (N) uint8
};

}  // namespace tessera::examples

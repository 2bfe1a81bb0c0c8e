// A text file as samples for a language model: every byte is a token, every sample a window of the text.
// Windows do not overlap.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::examples {

/// Owns a mapping of the file, so that the ranks of a host share its memory. The file must not shrink while
/// it is in use. Immutable.
class ByteText {
 public:
  /// Windows have `sequence` bytes and the byte after. Throws DataError if the file cannot be read or
  /// is shorter than one window.
  ByteText(const std::string& path, int64_t sequence);

  int64_t num_windows() const { return (bytes_.numel() - 1) / sequence_; }
  /// (B, sequence + 1) int64: the windows with these numbers, each with the byte that follows it.
  at::Tensor windows(const std::vector<int64_t>& numbers) const;

 private:
  int64_t sequence_;
  at::Tensor bytes_;  // (N) uint8
};

}  // namespace tessera::examples

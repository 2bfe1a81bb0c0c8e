// Samples text from a byte-level language model, byte by byte.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

namespace tessera::examples {

struct SampleOptions {
  std::string prompt = "\n";  ///< the text to continue; not empty
  int64_t num_bytes = 128;    ///< number of bytes to sample
  int64_t sequence = 128;     ///< context length of the model, bytes
  double temperature = 0.8;   ///< 0: always the most likely byte
  uint64_t seed = 0;
};

/// Or Collective if `logits_of` is: it is called num_bytes times, with the same shapes on every rank.
/// `logits_of`: (1, T) int64 bytes -> (1, T, V) logits, V at least 256. Returns the sampled bytes, which are
/// equal on every machine with equal logits.
std::string sample_text(const std::function<at::Tensor(const at::Tensor& bytes)>& logits_of,
                        const SampleOptions& options);

}  // namespace tessera::examples

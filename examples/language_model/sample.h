// Text drawn from a language model of bytes, one after another.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

namespace tessera::examples {

struct SampleOptions {
  std::string prompt = "\n";  ///< what the text goes on from; not empty
  int64_t num_bytes = 128;    ///< drawn after it
  int64_t sequence = 128;     ///< what the model can read at once, bytes
  double temperature = 0.8;   ///< 0: always the likeliest byte
  uint64_t seed = 0;
};

/// Local, but for what `logits_of` is: that is called num_bytes times, on every rank with the same shapes.
/// `logits_of`: (1, T) int64 bytes -> (1, T, V) logits, V at least 256. Returns the drawn bytes. The same
/// on every machine where the logits are.
std::string sample_text(const std::function<at::Tensor(const at::Tensor& bytes)>& logits_of,
                        const SampleOptions& options);

}  // namespace tessera::examples

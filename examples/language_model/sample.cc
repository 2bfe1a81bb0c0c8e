#include "examples/language_model/sample.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "core/check.h"

namespace tessera::examples {
namespace {

constexpr int64_t kNumBytes = 256;

/// logits: (256) fp32 on the CPU.
int64_t draw(const at::Tensor& logits, double temperature, std::mt19937_64& random) {
  if (temperature == 0) return logits.argmax().item<int64_t>();
  const at::Tensor probabilities = logits.to(at::kDouble).div(temperature).softmax(0);
  double rest = std::ldexp(static_cast<double>(random() >> 11),
                           -53);  // std::uniform_real_distribution differs between libraries
  for (int64_t byte = 0; byte < kNumBytes; ++byte) {
    rest -= probabilities.const_data_ptr<double>()[byte];
    if (rest < 0) return byte;
  }
  return probabilities.argmax().item<int64_t>();
}

}  // namespace

std::string sample_text(const std::function<at::Tensor(const at::Tensor& bytes)>& logits_of,
                        const SampleOptions& options) {
  TESSERA_CHECK(!options.prompt.empty() && options.sequence > 0);
  const at::NoGradGuard no_grad;
  std::mt19937_64 random(options.seed);
  std::string text = options.prompt;
  for (int64_t i = 0; i < options.num_bytes; ++i) {
    const auto length = std::min(options.sequence, static_cast<int64_t>(text.size()));
    at::Tensor input = at::empty({1, length}, at::kLong);
    for (int64_t k = 0; k < length; ++k)
      input.mutable_data_ptr<int64_t>()[k] =
          static_cast<unsigned char>(text[text.size() - static_cast<size_t>(length - k)]);
    const at::Tensor logits = logits_of(input).select(0, 0).select(0, length - 1).narrow(0, 0, kNumBytes);
    text.push_back(
        static_cast<char>(draw(logits.to(at::kCPU, at::kFloat).contiguous(), options.temperature, random)));
  }
  return text.substr(options.prompt.size());
}

}  // namespace tessera::examples

#include "zero/kernels/adam_8bit.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <variant>
#include <vector>

#include "core/check.h"
#include "core/error.h"
#include "core/every_cpu.h"
#include "core/str.h"
#include "zero/kernels/adam_8bit_block.h"
#include "zero/kernels/cuda.h"
#include "zero/kernels/make_rule.h"
#include "zero/kernels/parallel.h"

namespace tessera::kernels {
namespace {

constexpr int kDecades = 7;

/// The positive values: in decade i, from 0.1 to 1 times 10^(i - 6), the middles of `first` * 2^i equal
/// parts; then 1.
std::vector<float> positive_values(int64_t first) {
  std::vector<float> values;
  for (int i = 0; i < kDecades; ++i) {
    const auto parts = static_cast<double>(first << i);
    for (double part = 0; part < parts; part += 1)
      values.push_back(
          static_cast<float>(std::pow(10.0, i - (kDecades - 1)) * (0.1 + 0.9 * (part + 0.5) / parts)));
  }
  values.push_back(1.0F);
  return values;
}

void set_values(Codebook& book, bool is_signed) {
  std::vector<float> values = positive_values(is_signed ? 1 : 2);
  const size_t num_positive = values.size();
  if (is_signed)  // there is no -1
    for (size_t i = 0; i + 1 < num_positive; ++i) values.push_back(-values[i]);
  values.push_back(0.0F);
  std::sort(values.begin(), values.end());
  TESSERA_CHECK(values.size() == std::size(book.values));
  std::copy(values.begin(), values.end(), book.values);
  book.zero = static_cast<int32_t>(std::find(values.begin(), values.end(), 0.0F) - values.begin());
}

void set_decades(Codebook& book, int64_t first) {
  static_assert(Codebook::kThresholds == kDecades + 1);
  const std::vector<float> values = positive_values(first);
  double below = 0;
  int32_t code = 1;  // of the decade's first value; 0 is 0
  for (int i = 0; i <= kDecades; ++i) {
    const double lowest = values[static_cast<size_t>(code) - 1];
    book.above[i] = static_cast<float>((below + lowest) / 2);
    book.least[i] = book.most[i] = static_cast<float>(code);
    book.factor[i] = 0;
    if (i == kDecades) break;  // 1 itself
    const auto parts = static_cast<double>(first << i);
    book.factor[i] = static_cast<float>(std::pow(10.0, kDecades - 1 - static_cast<double>(i)) / 0.9 * parts);
    book.offset[i] = static_cast<float>(code - 0.1 / 0.9 * parts);
    code += static_cast<int32_t>(parts);
    book.most[i] = static_cast<float>(code - 1);
    below = values[static_cast<size_t>(code) - 2];
  }
  book.offset[kDecades] = static_cast<float>(code);
}

/// code_of() of a block at most, whose largest magnitude is `most`, above 0. GCC makes vector instructions of
/// this form: the tables are local copies, codes are fp32 until the end (all are below 2^24), and bytes are
/// written by a loop of their own.
TESSERA_EVERY_CPU void write_codes(const float* __restrict in, float most, const Codebook& book, int64_t n,
                                   uint8_t* __restrict codes) {
  using Table = std::array<float, Codebook::kThresholds>;
  const Table above = std::to_array(book.above), factors = std::to_array(book.factor),
              offsets = std::to_array(book.offset), least_codes = std::to_array(book.least),
              greatest_codes = std::to_array(book.most);
  const float scale = 1 / most;
  const int32_t zero = book.zero;
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init): written before it is read
  alignas(64) std::array<int32_t, kBlockNumel8bit> wide;
  for (int64_t i = 0; i < n; ++i) {
    const float x = std::abs(in[i]) * scale;
    float factor = 0, offset = 0, least = 0, greatest = 0;
#pragma GCC unroll 8
    for (size_t j = 0; j < Codebook::kThresholds; ++j) {
      const bool is_above = x > above[j];
      factor = is_above ? factors[j] : factor;
      offset = is_above ? offsets[j] : offset;
      least = is_above ? least_codes[j] : least;
      greatest = is_above ? greatest_codes[j] : greatest;
    }
    float code = x * factor + offset;
    code = code < least ? least : code;
    code = code > greatest ? greatest : code;
    const auto positive = static_cast<int32_t>(code);            // rounded down
    const int32_t negative = positive > zero ? zero : positive;  // there is no -1
    wide[static_cast<size_t>(i)] = in[i] < 0 ? zero - negative : zero + positive;
  }
  for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(wide[static_cast<size_t>(i)]);
}

/// Brings the moments of a block up to date, and the weights by them.
TESSERA_EVERY_CPU void update_values(const AdamRule& rule, const float* __restrict gradient, int64_t n,
                                     float* __restrict m, float* __restrict v, float* __restrict weights) {
  float none = 0;
  for (int64_t i = 0; i < n; ++i) {
    weights[i] = rule.step(weights[i], gradient[i], m[i], v[i], none);
    v[i] = v[i] > kMostMagnitude8bit ? kMostMagnitude8bit : v[i];
  }
}

TESSERA_EVERY_CPU float largest_magnitude(const float* __restrict in, int64_t n) {
  constexpr int kLanes = 16;
  std::array<float, kLanes> lanes{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float x = std::abs(in[i + lane]);
      lanes[static_cast<size_t>(lane)] =
          x > lanes[static_cast<size_t>(lane)] ? x : lanes[static_cast<size_t>(lane)];
    }
  for (; i < n; ++i) lanes[0] = std::max(lanes[0], std::abs(in[i]));
  return *std::max_element(lanes.begin(), lanes.end());
}

void read_codes(const uint8_t* __restrict codes, float absmax, const Codebook& book, int64_t n,
                float* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = book.values[codes[i]] * absmax;
}

void quantize_block(const float* in, const Codebook& book, int64_t n, uint8_t* codes, float* absmax) {
  *absmax = largest_magnitude(in, n);
  if (*absmax < kLeastMagnitude8bit)
    std::fill(codes, codes + n, static_cast<uint8_t>(book.zero));
  else
    write_codes(in, *absmax, book, n, codes);
}

void update_block(const Adam8bitArgs& block, const AdamRule& rule, const Codebook& first,
                  const Codebook& second) {
  alignas(64) std::array<float, kBlockNumel8bit> m{}, v{};
  read_codes(block.codes1, *block.absmax1, first, block.numel, m.data());
  read_codes(block.codes2, *block.absmax2, second, block.numel, v.data());
  update_values(rule, block.gradient, block.numel, m.data(), v.data(), block.weights);
  quantize_block(m.data(), first, block.numel, block.codes1, block.absmax1);
  quantize_block(v.data(), second, block.numel, block.codes2, block.absmax2);
}

}  // namespace

const Codebook& codebook(bool is_signed) {
  const auto make = [](bool with_sign) {
    Codebook book{};
    set_values(book, with_sign);
    set_decades(book, with_sign ? 1 : 2);
    return book;
  };
  static const Codebook first = make(true), second = make(false);
  return is_signed ? first : second;
}

std::span<const float, 256> code_values(bool is_signed) {
  return std::span<const float, 256>(codebook(is_signed).values);
}

uint8_t code_of_zero(bool is_signed) { return static_cast<uint8_t>(codebook(is_signed).zero); }

void adam_8bit(const at::Tensor& weights, const at::Tensor& gradient, const Moment8bit& first,
               const Moment8bit& second, const Hyper& hyper, int64_t step) {
  const int64_t numel = weights.numel(), num_blocks = num_blocks_8bit(numel);
  TESSERA_CHECK(step >= 1, "step is ", step);
  TESSERA_CHECK(!hyper.amsgrad && !hyper.maximize);
  if (!weights.is_cpu() && !weights.is_cuda())
    throw Error("AdamW8bit: a parameter is on ", weights.device().str(), "; expected the CPU or CUDA");
  const auto check = [&](const at::Tensor& tensor, at::ScalarType type, int64_t expected) {
    TESSERA_CHECK(tensor.scalar_type() == type && tensor.dim() == 1 && tensor.numel() == expected &&
                  tensor.is_contiguous() && tensor.device() == weights.device());
  };
  check(weights, at::kFloat, numel);
  check(gradient, at::kFloat, numel);
  for (const Moment8bit* moment : {&first, &second}) {
    check(moment->codes, at::kByte, numel);
    check(moment->absmax, at::kFloat, num_blocks);
  }
  const AdamRule rule = std::get<AdamRule>(make_rule(OptimizerKind::kAdamW, hyper, step));
  const Codebook &book1 = codebook(true), &book2 = codebook(false);
  const Adam8bitArgs whole{numel,
                           weights.data_ptr<float>(),
                           gradient.const_data_ptr<float>(),
                           first.codes.data_ptr<uint8_t>(),
                           second.codes.data_ptr<uint8_t>(),
                           first.absmax.data_ptr<float>(),
                           second.absmax.data_ptr<float>()};
  if (weights.is_cuda())
    return cuda::run(TESSERA_RESOLVE(tessera_cuda_adam_8bit), "adam_8bit", weights.device(), &whole, &rule,
                     &book1, &book2);
  parallel_chunks(num_blocks, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i * kBlockNumel8bit;
      update_block({std::min<int64_t>(kBlockNumel8bit, numel - at), whole.weights + at, whole.gradient + at,
                    whole.codes1 + at, whole.codes2 + at, whole.absmax1 + i, whole.absmax2 + i},
                   rule, book1, book2);
    }
  });
}

}  // namespace tessera::kernels

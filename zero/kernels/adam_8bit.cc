#include "zero/kernels/adam_8bit.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/every_cpu.h"
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

std::array<float, 256> make_values(bool is_signed) {
  std::vector<float> values = positive_values(is_signed ? 1 : 2);
  const size_t num_positive = values.size();
  if (is_signed)  // there is no -1
    for (size_t i = 0; i + 1 < num_positive; ++i) values.push_back(-values[i]);
  values.push_back(0.0F);
  std::sort(values.begin(), values.end());
  std::array<float, 256> array{};
  TESSERA_CHECK(values.size() == array.size());
  std::copy(values.begin(), values.end(), array.begin());
  return array;
}

/// Where a magnitude from 0 to 1 lies among the codes of its sign: below threshold 0 it is 0, above the last
/// one 1, and between thresholds j and j + 1 in decade j, whose values are the middles of equal parts: so the
/// nearest one is found by arithmetic, which vector instructions have.
struct Decades {
  static constexpr int kThresholds = kDecades + 1;
  std::array<float, kThresholds> above{};  // halfway between the values on both sides
  std::array<float, kThresholds> factor{},
      offset{};                                    // the code is factor * magnitude + offset, rounded down,
  std::array<float, kThresholds> least{}, most{};  // and within these
};

Decades make_decades(int64_t first) {
  const std::vector<float> values = positive_values(first);
  Decades decades;
  double below = 0;
  int32_t code = 1;  // of the decade's first value; 0 is 0
  for (size_t i = 0; i <= kDecades; ++i) {
    const double lowest = values[static_cast<size_t>(code) - 1];
    decades.above[i] = static_cast<float>((below + lowest) / 2);
    decades.least[i] = decades.most[i] = static_cast<float>(code);
    if (i == kDecades) break;  // 1 itself
    const auto parts = static_cast<double>(first << i);
    decades.factor[i] =
        static_cast<float>(std::pow(10.0, kDecades - 1 - static_cast<double>(i)) / 0.9 * parts);
    decades.offset[i] = static_cast<float>(code - 0.1 / 0.9 * parts);
    code += static_cast<int32_t>(parts);
    decades.most[i] = static_cast<float>(code - 1);
    below = values[static_cast<size_t>(code) - 2];
  }
  decades.offset[kDecades] = static_cast<float>(code);
  return decades;
}

struct Codebook {
  std::array<float, 256> values;
  int32_t zero;  // the code of 0
  Decades decades;

  explicit Codebook(bool is_signed)
      : values(make_values(is_signed)),
        zero(static_cast<int32_t>(std::find(values.begin(), values.end(), 0.0F) - values.begin())),
        decades(make_decades(is_signed ? 1 : 2)) {}
};

const Codebook& codebook(bool is_signed) {
  static const Codebook first(true), second(false);
  return is_signed ? first : second;
}

struct Formula {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, keep, step_size, root_correction2, eps;
};

Formula formula_of(const Hyper& hyper, int64_t step) {
  const auto t = static_cast<double>(step);
  const double correction1 = hyper.bias_correction ? 1 - std::pow(hyper.beta1, t) : 1;
  const double correction2 = hyper.bias_correction ? 1 - std::pow(hyper.beta2, t) : 1;
  return {static_cast<float>(hyper.beta1),
          static_cast<float>(1 - hyper.beta1),
          static_cast<float>(hyper.beta2),
          static_cast<float>(1 - hyper.beta2),
          static_cast<float>(1 - hyper.lr * hyper.weight_decay),
          static_cast<float>(hyper.lr / correction1),
          static_cast<float>(std::sqrt(correction2)),
          static_cast<float>(hyper.eps)};
}

struct Block {
  float* weights;
  const float* gradient;
  uint8_t *codes1, *codes2;
  float *absmax1, *absmax2;
  int64_t numel;
};

/// Writes the codes of `in` / `most`, of a block at most. `most` is above 0. GCC makes vector instructions of
/// this form: the tables are local copies, codes are fp32 until the end (all are below 2^24), and bytes are
/// written by a loop of their own.
TESSERA_EVERY_CPU void write_codes(const float* __restrict in, float most, const Codebook& book, int64_t n,
                                   uint8_t* __restrict codes) {
  const auto above = book.decades.above, factors = book.decades.factor, offsets = book.decades.offset,
             least_codes = book.decades.least, greatest_codes = book.decades.most;
  const float scale = 1 / most;
  const int32_t zero = book.zero;
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init): written before it is read
  alignas(64) std::array<int32_t, kBlockNumel8bit> wide;
  for (int64_t i = 0; i < n; ++i) {
    const float x = std::abs(in[i]) * scale;
    float factor = 0, offset = 0, least = 0, greatest = 0;
#pragma GCC unroll 8
    for (size_t j = 0; j < Decades::kThresholds; ++j) {
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
TESSERA_EVERY_CPU void update_values(const Formula& f, const float* __restrict first,
                                     const float* __restrict second, const float* __restrict gradient,
                                     int64_t n, float* __restrict m, float* __restrict v,
                                     float* __restrict weights) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = gradient[i];
    m[i] = f.beta1 * first[i] + f.one_minus_beta1 * g;
    v[i] = f.beta2 * second[i] + f.one_minus_beta2 * g * g;
    const float denominator = std::sqrt(v[i]) / f.root_correction2 + f.eps;
    weights[i] = weights[i] * f.keep - f.step_size * (m[i] / denominator);
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
  // 1 / a subnormal number is not finite: codes of such a block are zeros, as are its values next to any
  // other.
  if (*absmax < 1e-37F)
    std::fill(codes, codes + n, static_cast<uint8_t>(book.zero));
  else
    write_codes(in, *absmax, book, n, codes);
}

void update_block(const Block& block, const Formula& f, const Codebook& first, const Codebook& second) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init): written before they are read
  alignas(64) std::array<float, kBlockNumel8bit> m, v;
  alignas(64) std::array<float, kBlockNumel8bit> m_before{}, v_before{};
  read_codes(block.codes1, *block.absmax1, first, block.numel, m_before.data());
  read_codes(block.codes2, *block.absmax2, second, block.numel, v_before.data());
  update_values(f, m_before.data(), v_before.data(), block.gradient, block.numel, m.data(), v.data(),
                block.weights);
  quantize_block(m.data(), first, block.numel, block.codes1, block.absmax1);
  quantize_block(v.data(), second, block.numel, block.codes2, block.absmax2);
}

/// (blocks, 256), the last one filled up with zeros.
at::Tensor in_blocks(const at::Tensor& flat) {
  const int64_t padded = (flat.numel() + kBlockNumel8bit - 1) / kBlockNumel8bit * kBlockNumel8bit;
  return at::constant_pad_nd(flat, {0, padded - flat.numel()}).view({-1, kBlockNumel8bit});
}

at::Tensor values_on(at::Device device, bool is_signed) {
  const auto& values = codebook(is_signed).values;
  return at::from_blob(const_cast<float*>(values.data()), {256}, at::dtype(at::kFloat).device(at::kCPU))
      .to(device, false, true);
}

/// Writes the codes and largest magnitudes of `values`, (n) fp32.
void quantize(const at::Tensor& values, const Moment8bit& into, bool is_signed) {
  const at::Tensor blocks = in_blocks(values);
  const at::Tensor most = blocks.abs().amax(1);
  into.absmax.copy_(most);
  const at::Tensor fractions = blocks / at::where(most >= 1e-37, most, at::ones_like(most)).unsqueeze(1);
  const at::Tensor known = values_on(values.device(), is_signed);
  const at::Tensor middles = (known.slice(0, 0, 255) + known.slice(0, 1)) / 2;
  into.codes.copy_(
      at::bucketize(fractions, middles, /*out_int32=*/true).view({-1}).slice(0, 0, values.numel()));
}

}  // namespace

const std::array<float, 256>& code_values(bool is_signed) { return codebook(is_signed).values; }

uint8_t code_of_zero(bool is_signed) { return static_cast<uint8_t>(codebook(is_signed).zero); }

at::Tensor dequantize(const Moment8bit& moment, bool is_signed) {
  const at::Tensor fractions =
      values_on(moment.codes.device(), is_signed).index_select(0, moment.codes.to(at::kInt));
  return in_blocks(fractions).mul(moment.absmax.unsqueeze(1)).view({-1}).slice(0, 0, moment.codes.numel());
}

void adam_8bit_by_operators(const at::Tensor& weights, const at::Tensor& gradient, const Moment8bit& first,
                            const Moment8bit& second, const Hyper& hyper, int64_t step) {
  const Formula f = formula_of(hyper, step);
  const at::Tensor m = dequantize(first, true).mul_(f.beta1).add_(gradient, f.one_minus_beta1);
  const at::Tensor v =
      dequantize(second, false).mul_(f.beta2).addcmul_(gradient, gradient, f.one_minus_beta2);
  weights.mul_(f.keep).sub_((m / v.sqrt().div_(f.root_correction2).add_(f.eps)).mul_(f.step_size));
  quantize(m, first, true);
  quantize(v, second, false);
}

void adam_8bit(const at::Tensor& weights, const at::Tensor& gradient, const Moment8bit& first,
               const Moment8bit& second, const Hyper& hyper, int64_t step) {
  const int64_t numel = weights.numel(), num_blocks = (numel + kBlockNumel8bit - 1) / kBlockNumel8bit;
  TESSERA_CHECK(step >= 1, "step is ", step);
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
  if (!weights.is_cpu()) return adam_8bit_by_operators(weights, gradient, first, second, hyper, step);
  const Formula formula = formula_of(hyper, step);
  const Codebook &book1 = codebook(true), &book2 = codebook(false);
  const Block whole{weights.data_ptr<float>(),
                    gradient.const_data_ptr<float>(),
                    first.codes.data_ptr<uint8_t>(),
                    second.codes.data_ptr<uint8_t>(),
                    first.absmax.data_ptr<float>(),
                    second.absmax.data_ptr<float>(),
                    numel};
  parallel_chunks(num_blocks, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i * kBlockNumel8bit;
      update_block({whole.weights + at, whole.gradient + at, whole.codes1 + at, whole.codes2 + at,
                    whole.absmax1 + i, whole.absmax2 + i, std::min(kBlockNumel8bit, numel - at)},
                   formula, book1, book2);
    }
  });
}

}  // namespace tessera::kernels

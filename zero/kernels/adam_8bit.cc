#include "zero/kernels/adam_8bit.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/check.h"
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

/// Finds the nearest value of a magnitude from 0 to 1 among ascending values. A table has the answer for the
/// lower end of each range of floats with the same first 16 bits; at most two further values begin in it.
class Nearest {
 public:
  /// `values`: ascending, from 0.
  explicit Nearest(const std::vector<float>& values) {
    for (size_t i = 0; i + 1 < values.size(); ++i) middles_[i] = (values[i] + values[i + 1]) / 2;
    std::fill(middles_.begin() + static_cast<int64_t>(values.size()) - 1, middles_.end(), 2.0F);
    const auto search = [&](uint32_t bits) {
      const auto x = std::bit_cast<float>(bits);
      return static_cast<uint8_t>(std::lower_bound(middles_.begin(), middles_.end(), x) - middles_.begin());
    };
    for (uint32_t i = 0; i < kTable; ++i) {
      table_[i] = search(i << 16);
      TESSERA_CHECK(search((i << 16) | 0xffff) - table_[i] <= 2);
    }
  }
  /// `x`: from 0 to 1.
  uint8_t operator()(float x) const {
    uint32_t at = table_[std::bit_cast<uint32_t>(x) >> 16];
    at += x > middles_[at] ? 1 : 0;
    at += x > middles_[at] ? 1 : 0;
    return static_cast<uint8_t>(at);
  }

 private:
  static constexpr uint32_t kTable = 0x3f81;  // up to 1.0F
  std::array<float, 260> middles_{};
  std::array<uint8_t, kTable> table_{};
};

struct Codebook {
  std::array<float, 256> values;
  uint8_t zero;      // the code of 0
  Nearest positive;  // codes from `zero` on
  Nearest negative;  // codes from `zero` down; of magnitudes

  explicit Codebook(bool is_signed)
      : values(make_values(is_signed)),
        zero(static_cast<uint8_t>(std::find(values.begin(), values.end(), 0.0F) - values.begin())),
        positive(std::vector<float>(values.begin() + zero, values.end())),
        negative(magnitudes(values, zero)) {}

  static std::vector<float> magnitudes(const std::array<float, 256>& values, uint8_t zero) {
    std::vector<float> found;
    for (int i = zero; i >= 0; --i) found.push_back(-values[static_cast<size_t>(i)]);
    found.front() = 0.0F;
    return found;
  }
  uint8_t signed_code(float fraction) const {
    return fraction < 0 ? static_cast<uint8_t>(zero - negative(-fraction))
                        : static_cast<uint8_t>(zero + positive(fraction));
  }
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

void update_block(const Block& block, const Formula& f, const Codebook& first, const Codebook& second) {
  std::array<float, kBlockNumel8bit> m, v;  // NOLINT(cppcoreguidelines-pro-type-member-init): written below
  float most1 = 0, most2 = 0;
  const float before1 = *block.absmax1, before2 = *block.absmax2;
  for (int64_t i = 0; i < block.numel; ++i) {
    const auto at = static_cast<size_t>(i);
    const float g = block.gradient[i];
    m[at] = f.beta1 * (first.values[block.codes1[i]] * before1) + f.one_minus_beta1 * g;
    v[at] = f.beta2 * (second.values[block.codes2[i]] * before2) + f.one_minus_beta2 * g * g;
  }
  for (int64_t i = 0; i < block.numel; ++i) {
    const auto at = static_cast<size_t>(i);
    const float denominator = std::sqrt(v[at]) / f.root_correction2 + f.eps;
    block.weights[i] = block.weights[i] * f.keep - f.step_size * (m[at] / denominator);
    most1 = std::max(most1, std::abs(m[at]));
    most2 = std::max(most2, v[at]);
  }
  *block.absmax1 = most1;
  *block.absmax2 = most2;
  for (int64_t i = 0; i < block.numel; ++i) {
    const auto at = static_cast<size_t>(i);
    block.codes1[i] = most1 > 0 ? first.signed_code(m[at] / most1) : first.zero;
    block.codes2[i] =
        most2 > 0 ? static_cast<uint8_t>(second.zero + second.positive(v[at] / most2)) : second.zero;
  }
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
  const at::Tensor fractions = blocks / at::where(most > 0, most, at::ones_like(most)).unsqueeze(1);
  const at::Tensor known = values_on(values.device(), is_signed);
  const at::Tensor middles = (known.slice(0, 0, 255) + known.slice(0, 1)) / 2;
  into.codes.copy_(
      at::bucketize(fractions, middles, /*out_int32=*/true).view({-1}).slice(0, 0, values.numel()));
}

}  // namespace

const std::array<float, 256>& code_values(bool is_signed) { return codebook(is_signed).values; }

uint8_t code_of_zero(bool is_signed) { return codebook(is_signed).zero; }

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

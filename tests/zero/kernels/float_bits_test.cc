// core/float_bits.h against torch's conversions, for every half-precision number and the floats around them.
#include "core/float_bits.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace tessera {
namespace {

TEST(FloatBits, EveryHalfPrecisionNumberReadsAsTorchReadsIt) {
  for (uint32_t bits = 0; bits < 65'536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    for (const auto& [found, expected] :
         {std::pair{float_of_bf16(half), static_cast<float>(c10::BFloat16(half, c10::BFloat16::from_bits()))},
          std::pair{float_of_fp16(half), static_cast<float>(c10::Half(half, c10::Half::from_bits()))}}) {
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(found)) << bits;
      } else {
        ASSERT_EQ(bits_of(found), bits_of(expected)) << bits;
      }
    }
  }
}

/// Floats over the whole range, and those around every half-precision number and every tie between two.
std::vector<float> floats_to_round() {
  std::vector<float> values;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 2'003)
    values.push_back(float_of(static_cast<uint32_t>(bits)));
  for (uint32_t high = 0; high < 65'536; ++high)
    for (uint32_t low : {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu})
      values.push_back(float_of(high << 16 | low));
  for (uint32_t half = 0; half < 65'536; ++half) {
    const uint32_t bits = bits_of(float_of_fp16(static_cast<uint16_t>(half)));
    for (uint32_t low : {0u, 1u, 0x0FFFu, 0x1000u, 0x1001u}) values.push_back(float_of(bits + low));
  }
  for (int tie = 1; tie < 4'096; ++tie)
    values.push_back(static_cast<float>(tie) * 0x1p-25f);  // fp16 subnormals
  return values;
}

TEST(FloatBits, CastsRoundAsTorchDoes) {
  std::vector<float> values = floats_to_round();
  const at::Tensor input = at::from_blob(values.data(), {static_cast<int64_t>(values.size())}, at::kFloat);
  const at::Tensor bf16 = input.to(at::kBFloat16).view(at::kShort);
  const at::Tensor fp16 = input.to(at::kHalf).view(at::kShort);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t found_bf16 = bf16_of_float(values[i]);
    const uint16_t found_fp16 = fp16_of_float(values[i]);
    if (std::isnan(values[i])) {
      ASSERT_TRUE(std::isnan(float_of_bf16(found_bf16)) && std::isnan(float_of_fp16(found_fp16)));
      continue;
    }
    ASSERT_EQ(found_bf16, static_cast<uint16_t>(bf16.const_data_ptr<int16_t>()[i])) << values[i];
    ASSERT_EQ(found_fp16, static_cast<uint16_t>(fp16.const_data_ptr<int16_t>()[i])) << values[i];
  }
}

}  // namespace
}  // namespace tessera

#include "checkpoint/convert.h"

#include <bit>
#include <cstring>

#include "core/check.h"

namespace tessera::checkpoint {
namespace {

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

float from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

float from_fp16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
  if (exponent == 0) {  // zero and denormal numbers: mantissa x 2^-24, exact in fp32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  const uint32_t wide = exponent == 0x1f ? 0xff : exponent + (127 - 15);
  return std::bit_cast<float>(sign | wide << 23 | mantissa << 13);
}

uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  // Rounding could carry a NaN's mantissa into infinity.
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

template <class Source, class Finish>
void convert_all(std::span<const std::byte> from, std::span<std::byte> to, Finish finish) {
  using Target = decltype(finish(Source{}));
  const size_t numel = from.size() / sizeof(Source);
  for (size_t i = 0; i < numel; ++i) {
    const Target value = finish(load<Source>(from.data() + i * sizeof(Source)));
    std::memcpy(to.data() + i * sizeof(Target), &value, sizeof value);
  }
}

template <class Finish>
void convert_from(std::span<const std::byte> from, ElementType from_type, std::span<std::byte> to, Finish finish) {
  switch (from_type) {
    case ElementType::kFloat64:
      return convert_all<double>(from, to, [=](double value) { return finish(static_cast<float>(value)); });
    case ElementType::kFloat32: return convert_all<float>(from, to, finish);
    case ElementType::kBFloat16:
      return convert_all<uint16_t>(from, to, [=](uint16_t bits) { return finish(from_bf16(bits)); });
    case ElementType::kFloat16:
      return convert_all<uint16_t>(from, to, [=](uint16_t bits) { return finish(from_fp16(bits)); });
    default: TESSERA_CHECK(false, "no conversion from ", name_of(from_type));
  }
}

}  // namespace

void convert(std::span<const std::byte> from, ElementType from_type, std::span<std::byte> to, ElementType to_type) {
  TESSERA_CHECK(static_cast<int64_t>(from.size()) / size_bytes(from_type) ==
                static_cast<int64_t>(to.size()) / size_bytes(to_type));
  switch (to_type) {
    case ElementType::kFloat32: return convert_from(from, from_type, to, [](float value) { return value; });
    case ElementType::kBFloat16: return convert_from(from, from_type, to, to_bf16);
    default: TESSERA_CHECK(false, "no conversion to ", name_of(to_type));
  }
}

}  // namespace tessera::checkpoint

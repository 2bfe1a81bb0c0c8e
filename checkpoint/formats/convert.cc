#include "checkpoint/formats/convert.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "core/str.h"

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

uint16_t to_fp16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t rounded = 0;
  if (magnitude > 0x7f800000) {
    rounded = 0x7e00;  // NaN
  } else if (magnitude >= 0x47800000) {
    rounded = 0x7c00;  // 2^16 and more: infinity
  } else if (magnitude < 0x38800000) {
    // Below 2^-14, fp16's numbers are the multiples of 2^-24. fp32's numbers from 0.5 to 1 have the same
    // spacing, so the addition rounds.
    rounded = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  } else {
    rounded =
        (magnitude - ((127 - 15) << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;  // a carry may give infinity
  }
  return static_cast<uint16_t>(sign | rounded);
}

bool is_infinite(float value) { return std::isinf(value); }
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
bool is_infinite(Bf16 value) { return (value.bits & 0x7fff) == 0x7f80; }
bool is_infinite(Fp16 value) { return (value.bits & 0x7fff) == 0x7c00; }

/// `widen`: exact, to float or double; `finish`: to the target's type. Returns how many
/// finite elements have become infinite.
template <class Source, class Widen, class Finish>
int64_t convert_all(std::span<const std::byte> from, std::span<std::byte> to, Widen widen, Finish finish) {
  using Target = decltype(finish(0.0f));
  const size_t numel = from.size() / sizeof(Source);
  int64_t num_overflowed = 0;
  for (size_t i = 0; i < numel; ++i) {
    const auto wide = widen(load<Source>(from.data() + i * sizeof(Source)));
    const Target value = finish(static_cast<float>(wide));
    num_overflowed += is_infinite(value) && std::isfinite(wide) ? 1 : 0;
    std::memcpy(to.data() + i * sizeof(Target), &value, sizeof value);
  }
  return num_overflowed;
}

template <class Finish>
int64_t convert_from(std::span<const std::byte> from, DType from_type, std::span<std::byte> to,
                     Finish finish) {
  const auto same = [](auto value) { return value; };
  switch (from_type) {
    case DType::kFloat64: return convert_all<double>(from, to, same, finish);
    case DType::kFloat32: return convert_all<float>(from, to, same, finish);
    case DType::kBFloat16: return convert_all<uint16_t>(from, to, from_bf16, finish);
    case DType::kFloat16: return convert_all<uint16_t>(from, to, from_fp16, finish);
    default: TESSERA_CHECK(false, "no conversion from ", name_of(from_type)); return 0;
  }
}

}  // namespace

int64_t convert(std::span<const std::byte> from, DType from_type, std::span<std::byte> to, DType to_type) {
  TESSERA_CHECK(static_cast<int64_t>(from.size()) / size_bytes(from_type) ==
                static_cast<int64_t>(to.size()) / size_bytes(to_type));
  switch (to_type) {
    case DType::kFloat32: return convert_from(from, from_type, to, [](float value) { return value; });
    case DType::kBFloat16:
      return convert_from(from, from_type, to, [](float value) { return Bf16{to_bf16(value)}; });
    case DType::kFloat16:
      return convert_from(from, from_type, to, [](float value) { return Fp16{to_fp16(value)}; });
    default: TESSERA_CHECK(false, "no conversion to ", name_of(to_type)); return 0;
  }
}

std::string rounded_to_fp32(const std::vector<std::string>& names) {
  constexpr size_t kMost = 5;
  return str("the precision of fp64: ", names.size(), names.size() == 1 ? " tensor is" : " tensors are",
             " rounded to fp32: ", join(std::span(names).first(std::min(names.size(), kMost)), ", "),
             names.size() > kMost ? ", …" : "");
}

}  // namespace tessera::checkpoint

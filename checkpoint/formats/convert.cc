#include "checkpoint/formats/convert.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "core/float_bits.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
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
    case DType::kBFloat16: return convert_all<uint16_t>(from, to, float_of_bf16, finish);
    case DType::kFloat16: return convert_all<uint16_t>(from, to, float_of_fp16, finish);
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
      return convert_from(from, from_type, to, [](float value) { return Bf16{bf16_of_float(value)}; });
    case DType::kFloat16:
      return convert_from(from, from_type, to, [](float value) { return Fp16{fp16_of_float(value)}; });
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

// DType: the element types a training run can hold, without libtorch, so that the layout, the
// configuration and the memory arithmetic can speak of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

enum class DType : uint8_t { kFloat32, kBFloat16, kFloat16, kFloat64 };

/// Local. Bytes of one element.
constexpr int64_t size_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return 8;
    case DType::kFloat32: return 4;
    case DType::kBFloat16:
    case DType::kFloat16: return 2;
  }
  return 0;
}

/// Local. The config's word for it: "fp32", "bf16", "fp16", "fp64".
constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return "fp64";
    case DType::kFloat32: return "fp32";
    case DType::kBFloat16: return "bf16";
    case DType::kFloat16: return "fp16";
  }
  return "?";
}

/// Local. DeepSpeed's and PyTorch's spellings: "fp32", "float32", "float", "bf16", "bfloat16",
/// "fp16", "float16", "half". Nothing for any other word.
constexpr std::optional<DType> parse_dtype(std::string_view word) {
  if (word == "fp32" || word == "float32" || word == "float") return DType::kFloat32;
  if (word == "bf16" || word == "bfloat16") return DType::kBFloat16;
  if (word == "fp16" || word == "float16" || word == "half") return DType::kFloat16;
  return std::nullopt;
}

}  // namespace tessera

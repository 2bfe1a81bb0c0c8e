// DType: the element types of tensors, independent of libtorch. Used by the layout, the configuration, the
// memory model, collectives and files. Parameters have one of the first four.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

enum class DType : uint8_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat64,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,
  kBool,  ///< one byte, 0 or 1
};

inline constexpr std::array kAllDTypes{DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                                       DType::kInt64,   DType::kInt32,   DType::kInt16,    DType::kInt8,
                                       DType::kUInt8,   DType::kBool};

constexpr bool is_floating(DType dtype) { return dtype <= DType::kFloat64; }

/// Local. Bytes of one element.
constexpr int64_t size_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64: return 8;
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
    case DType::kInt16: return 2;
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool: return 1;
  }
  return 0;
}

/// Local. Its name in the configuration and in files: "fp32", "bf16", "fp16", "fp64", "int64",
/// "int32", "int16", "int8", "uint8", "bool".
constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return "fp64";
    case DType::kInt64: return "int64";
    case DType::kInt32: return "int32";
    case DType::kInt16: return "int16";
    case DType::kInt8: return "int8";
    case DType::kUInt8: return "uint8";
    case DType::kBool: return "bool";
    case DType::kFloat32: return "fp32";
    case DType::kBFloat16: return "bf16";
    case DType::kFloat16: return "fp16";
  }
  return "?";
}

/// Local. The inverse of name_of(); nullopt for any other word.
constexpr std::optional<DType> dtype_named(std::string_view name) {
  for (DType dtype : kAllDTypes)
    if (name == name_of(dtype)) return dtype;
  return std::nullopt;
}

/// Local. DeepSpeed's and PyTorch's names of the compute types: "fp32", "float32", "float",
/// "bf16", "bfloat16", "fp16", "float16", "half". nullopt for any other word.
constexpr std::optional<DType> parse_dtype(std::string_view word) {
  if (word == "fp32" || word == "float32" || word == "float") return DType::kFloat32;
  if (word == "bf16" || word == "bfloat16") return DType::kBFloat16;
  if (word == "fp16" || word == "float16" || word == "half") return DType::kFloat16;
  return std::nullopt;
}

}  // namespace tessera

// DType: the element types of tensors, independent of libtorch. Used by the layout, the configuration, the
// memory model, collectives and files. Parameters have one of the first four.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

/// Parameters, collectives that sum, and the memory model know the first ten. The others are types of
/// buffers: they are moved, saved and loaded as bytes.
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
  kUInt16,
  kUInt32,
  kUInt64,
  kComplex32,  ///< two fp16: real, imaginary
  kComplex64,
  kComplex128,
  kFloat8E5m2,
  kFloat8E4m3fn,
  kFloat8E5m2fnuz,
  kFloat8E4m3fnuz,
  kFloat8E8m0fnu,
  kFloat4E2m1fnX2,  ///< two numbers a byte
  kBits8,           ///< torch's types of bits without a meaning; a byte each but for kBits16
  kBits16,
  kBits1x8,
  kBits2x4,
  kBits4x2,
  kInt1,  ///< torch's integers of less than eight bits take a byte each
  kInt2,
  kInt3,
  kInt4,
  kInt5,
  kInt6,
  kInt7,
  kUInt1,
  kUInt2,
  kUInt3,
  kUInt4,
  kUInt5,
  kUInt6,
  kUInt7,
};

struct DTypeInfo {
  DType dtype;
  std::string_view name;  ///< in the configuration and in files
  int64_t bytes;          ///< of one element
};

inline constexpr std::array kDTypes{
    DTypeInfo{DType::kFloat32, "fp32", 4},
    DTypeInfo{DType::kBFloat16, "bf16", 2},
    DTypeInfo{DType::kFloat16, "fp16", 2},
    DTypeInfo{DType::kFloat64, "fp64", 8},
    DTypeInfo{DType::kInt64, "int64", 8},
    DTypeInfo{DType::kInt32, "int32", 4},
    DTypeInfo{DType::kInt16, "int16", 2},
    DTypeInfo{DType::kInt8, "int8", 1},
    DTypeInfo{DType::kUInt8, "uint8", 1},
    DTypeInfo{DType::kBool, "bool", 1},
    DTypeInfo{DType::kUInt16, "uint16", 2},
    DTypeInfo{DType::kUInt32, "uint32", 4},
    DTypeInfo{DType::kUInt64, "uint64", 8},
    DTypeInfo{DType::kComplex32, "complex32", 4},
    DTypeInfo{DType::kComplex64, "complex64", 8},
    DTypeInfo{DType::kComplex128, "complex128", 16},
    DTypeInfo{DType::kFloat8E5m2, "float8_e5m2", 1},
    DTypeInfo{DType::kFloat8E4m3fn, "float8_e4m3fn", 1},
    DTypeInfo{DType::kFloat8E5m2fnuz, "float8_e5m2fnuz", 1},
    DTypeInfo{DType::kFloat8E4m3fnuz, "float8_e4m3fnuz", 1},
    DTypeInfo{DType::kFloat8E8m0fnu, "float8_e8m0fnu", 1},
    DTypeInfo{DType::kFloat4E2m1fnX2, "float4_e2m1fn_x2", 1},
    DTypeInfo{DType::kBits8, "bits8", 1},
    DTypeInfo{DType::kBits16, "bits16", 2},
    DTypeInfo{DType::kBits1x8, "bits1x8", 1},
    DTypeInfo{DType::kBits2x4, "bits2x4", 1},
    DTypeInfo{DType::kBits4x2, "bits4x2", 1},
    DTypeInfo{DType::kInt1, "int1", 1},
    DTypeInfo{DType::kInt2, "int2", 1},
    DTypeInfo{DType::kInt3, "int3", 1},
    DTypeInfo{DType::kInt4, "int4", 1},
    DTypeInfo{DType::kInt5, "int5", 1},
    DTypeInfo{DType::kInt6, "int6", 1},
    DTypeInfo{DType::kInt7, "int7", 1},
    DTypeInfo{DType::kUInt1, "uint1", 1},
    DTypeInfo{DType::kUInt2, "uint2", 1},
    DTypeInfo{DType::kUInt3, "uint3", 1},
    DTypeInfo{DType::kUInt4, "uint4", 1},
    DTypeInfo{DType::kUInt5, "uint5", 1},
    DTypeInfo{DType::kUInt6, "uint6", 1},
    DTypeInfo{DType::kUInt7, "uint7", 1},
};
static_assert([] {
  for (size_t i = 0; i < kDTypes.size(); ++i)
    if (static_cast<size_t>(kDTypes[i].dtype) != i) return false;
  return true;
}());

/// Whether files' conversions know it as a number with a fraction: fp32, bf16, fp16, fp64.
constexpr bool is_floating(DType dtype) { return dtype <= DType::kFloat64; }
/// Whether models compute in it: fp32, bf16, fp16.
constexpr bool is_compute_type(DType dtype) { return dtype <= DType::kFloat16; }
/// Whether a frozen parameter may have it: not torch's types of bits, and of less than a byte, which have no
/// operators.
constexpr bool is_kept_frozen(DType dtype) { return dtype <= DType::kFloat8E8m0fnu; }
/// The type of a parameter's values in an engine that computes in `compute`; fp32: each keeps its own. Types
/// that models do not compute in, such as those of quantized weights, stay.
constexpr DType dtype_in_unit(DType own, DType compute) {
  return compute == DType::kFloat32 || !is_compute_type(own) ? own : compute;
}

/// Bytes of one element.
constexpr int64_t size_bytes(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].bytes; }

/// Its name in the configuration and in files: "fp32", "bf16", "fp16", "fp64", "int64", "int32",
/// "int16", "int8", "uint8", "bool"; of the others torch's.
constexpr std::string_view name_of(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].name; }

/// The inverse of name_of(); nullopt for any other word.
constexpr std::optional<DType> dtype_named(std::string_view name) {
  for (const DTypeInfo& info : kDTypes)
    if (name == info.name) return info.dtype;
  return std::nullopt;
}

/// DeepSpeed's and PyTorch's names of the compute types: "fp32", "float32", "float",
/// "bf16", "bfloat16", "fp16", "float16", "half". nullopt for any other word.
constexpr std::optional<DType> parse_dtype(std::string_view word) {
  if (word == "fp32" || word == "float32" || word == "float") return DType::kFloat32;
  if (word == "bf16" || word == "bfloat16") return DType::kBFloat16;
  if (word == "fp16" || word == "float16" || word == "half") return DType::kFloat16;
  return std::nullopt;
}

}  // namespace tessera

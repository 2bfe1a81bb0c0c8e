// DType: the element types of tensors, independent of libtorch. Used by the layout, the configuration, the
// memory model, collectives and files. Parameters have one of the first four.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

// The one table of dtypes: X(the enumerator, its name in the configuration and in files, bytes of an element,
// libtorch's ScalarType). Parameters, collectives that sum, and the memory model know the first ten. The
// others are types of buffers: they are moved, saved and loaded as bytes. A bool is one byte, 0 or 1; a
// complex32 two fp16, real and imaginary; a float4_e2m1fn_x2 two numbers. torch's types of bits have no
// meaning, and take a byte each but for bits16; so do its integers of less than eight bits.
#define TESSERA_DTYPES(X)                                     \
  X(kFloat32, "fp32", 4, Float)                               \
  X(kBFloat16, "bf16", 2, BFloat16)                           \
  X(kFloat16, "fp16", 2, Half)                                \
  X(kFloat64, "fp64", 8, Double)                              \
  X(kInt64, "int64", 8, Long)                                 \
  X(kInt32, "int32", 4, Int)                                  \
  X(kInt16, "int16", 2, Short)                                \
  X(kInt8, "int8", 1, Char)                                   \
  X(kUInt8, "uint8", 1, Byte)                                 \
  X(kBool, "bool", 1, Bool)                                   \
  X(kUInt16, "uint16", 2, UInt16)                             \
  X(kUInt32, "uint32", 4, UInt32)                             \
  X(kUInt64, "uint64", 8, UInt64)                             \
  X(kComplex32, "complex32", 4, ComplexHalf)                  \
  X(kComplex64, "complex64", 8, ComplexFloat)                 \
  X(kComplex128, "complex128", 16, ComplexDouble)             \
  X(kFloat8E5m2, "float8_e5m2", 1, Float8_e5m2)               \
  X(kFloat8E4m3fn, "float8_e4m3fn", 1, Float8_e4m3fn)         \
  X(kFloat8E5m2fnuz, "float8_e5m2fnuz", 1, Float8_e5m2fnuz)   \
  X(kFloat8E4m3fnuz, "float8_e4m3fnuz", 1, Float8_e4m3fnuz)   \
  X(kFloat8E8m0fnu, "float8_e8m0fnu", 1, Float8_e8m0fnu)      \
  X(kFloat4E2m1fnX2, "float4_e2m1fn_x2", 1, Float4_e2m1fn_x2) \
  X(kBits8, "bits8", 1, Bits8)                                \
  X(kBits16, "bits16", 2, Bits16)                             \
  X(kBits1x8, "bits1x8", 1, Bits1x8)                          \
  X(kBits2x4, "bits2x4", 1, Bits2x4)                          \
  X(kBits4x2, "bits4x2", 1, Bits4x2)                          \
  X(kInt1, "int1", 1, Int1)                                   \
  X(kInt2, "int2", 1, Int2)                                   \
  X(kInt3, "int3", 1, Int3)                                   \
  X(kInt4, "int4", 1, Int4)                                   \
  X(kInt5, "int5", 1, Int5)                                   \
  X(kInt6, "int6", 1, Int6)                                   \
  X(kInt7, "int7", 1, Int7)                                   \
  X(kUInt1, "uint1", 1, UInt1)                                \
  X(kUInt2, "uint2", 1, UInt2)                                \
  X(kUInt3, "uint3", 1, UInt3)                                \
  X(kUInt4, "uint4", 1, UInt4)                                \
  X(kUInt5, "uint5", 1, UInt5)                                \
  X(kUInt6, "uint6", 1, UInt6)                                \
  X(kUInt7, "uint7", 1, UInt7)

#define TESSERA_ENUMERATOR(dtype, name, bytes, torch_type) dtype,
enum class DType : uint8_t { TESSERA_DTYPES(TESSERA_ENUMERATOR) };
#undef TESSERA_ENUMERATOR

struct DTypeInfo {
  DType dtype;
  std::string_view name;  ///< in the configuration and in files
  int64_t bytes;          ///< of one element
};

/// By DType.
#define TESSERA_INFO(dtype, name, bytes, torch_type) DTypeInfo{DType::dtype, name, bytes},
inline constexpr std::array kDTypes{TESSERA_DTYPES(TESSERA_INFO)};
#undef TESSERA_INFO

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

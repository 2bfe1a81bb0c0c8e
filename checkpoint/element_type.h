// ElementType: the element types of tensors in files: what parameters can have
// (core/dtype.h) and what buffers can have besides.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "core/dtype.h"

namespace tessera::checkpoint {

enum class ElementType : uint8_t {
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,
  kBool,  ///< one byte, 0 or 1
};

inline constexpr std::array kElementTypes{
    ElementType::kFloat64, ElementType::kFloat32, ElementType::kBFloat16, ElementType::kFloat16,
    ElementType::kInt64,   ElementType::kInt32,   ElementType::kInt16,    ElementType::kInt8,
    ElementType::kUInt8,   ElementType::kBool};

/// Local. Bytes of one element.
constexpr int64_t size_bytes(ElementType type) {
  switch (type) {
    case ElementType::kFloat64:
    case ElementType::kInt64: return 8;
    case ElementType::kFloat32:
    case ElementType::kInt32: return 4;
    case ElementType::kBFloat16:
    case ElementType::kFloat16:
    case ElementType::kInt16: return 2;
    case ElementType::kInt8:
    case ElementType::kUInt8:
    case ElementType::kBool: return 1;
  }
  return 0;
}

/// Local. The word for it in a manifest: "fp64", "fp32", "bf16", "fp16", "int64",
/// "int32", "int16", "int8", "uint8", "bool".
constexpr std::string_view name_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat64: return "fp64";
    case ElementType::kFloat32: return "fp32";
    case ElementType::kBFloat16: return "bf16";
    case ElementType::kFloat16: return "fp16";
    case ElementType::kInt64: return "int64";
    case ElementType::kInt32: return "int32";
    case ElementType::kInt16: return "int16";
    case ElementType::kInt8: return "int8";
    case ElementType::kUInt8: return "uint8";
    case ElementType::kBool: return "bool";
  }
  return "?";
}

/// Local. The inverse of name_of(); nothing for any other word.
constexpr std::optional<ElementType> parse_element_type(std::string_view word) {
  for (ElementType type : kElementTypes)
    if (word == name_of(type)) return type;
  return std::nullopt;
}

constexpr ElementType element_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return ElementType::kFloat64;
    case DType::kFloat32: return ElementType::kFloat32;
    case DType::kBFloat16: return ElementType::kBFloat16;
    case DType::kFloat16: return ElementType::kFloat16;
  }
  return ElementType::kFloat32;
}

/// Local. Nothing for integers and bool.
constexpr std::optional<DType> dtype_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat64: return DType::kFloat64;
    case ElementType::kFloat32: return DType::kFloat32;
    case ElementType::kBFloat16: return DType::kBFloat16;
    case ElementType::kFloat16: return DType::kFloat16;
    default: return std::nullopt;
  }
}

}  // namespace tessera::checkpoint

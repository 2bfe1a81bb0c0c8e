// Conversion of floating-point elements between the types of files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace tessera::checkpoint {

/// Converts `numel` elements from fp64, fp32, bf16 or fp16 to fp32, bf16 or fp16, as torch's
/// Tensor::to does: to nearest, ties to even; fp64 to bf16 and fp16 by way of fp32. NaN stays NaN. `from` and
/// `to` have numel elements of their types, need no alignment and must not overlap. Returns how many finite
/// elements have become infinite. Throws std::logic_error for other types.
int64_t convert(std::span<const std::byte> from, DType from_type, std::span<std::byte> to, DType to_type);

/// "the precision of fp64: 3 tensors are rounded to fp32: a, b, c", which names the first five.
std::string rounded_to_fp32(const std::vector<std::string>& names);

}  // namespace tessera::checkpoint

// The one pass of a reduction: reads the same range of all ranks' inputs and writes the sum.
#pragma once

#include <cstdint>

namespace tessera::comm::shm {

enum class Element : uint8_t {
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt64,
  kInt32,
  kInt8,
  kUInt8,
  kBool
};

/// Local. Bytes of one element.
int64_t size_of(Element element);

struct Sum {
  Element element = Element::kFloat32;
  const void* const* inputs = nullptr;  ///< [num_inputs], each (numel) elements; in rank order
  int num_inputs = 0;
  int64_t numel = 0;
  void* output = nullptr;  ///< (numel) of `output_element`; may be one of the inputs
  Element output_element = Element::kFloat32;
  double scale = 1;  ///< floating point only
  bool add = false;  ///< to what the output holds
};

/// Local. output = scale * (input 0 + input 1 + …) [+ output]. The sum of fp32, bf16 and fp16 is
/// formed in fp32 in the inputs' order, and rounded once; IEEE operations one by one, so every
/// instruction set gives the same bits. fp64 in fp64; integers wrap; bool is "or". Both elements
/// are equal but for fp32, bf16 and fp16.
void add_up(const Sum& sum);

}  // namespace tessera::comm::shm

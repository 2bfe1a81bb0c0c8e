// What an optimizer of whole parameters keeps in a checkpoint: values of JSON, and tensors of any size.
//
//   8 bytes                the length of the text, little-endian
//   the text               {"$tessera": "values", "value": {…}}, in which a tensor is
//                          {"$tessera": "tensor", "dtype": "torch.float32", "shape": [2, 3], "begin": 0,
//                          "bytes": 24}
//   the tensors' bytes     from "begin" on behind the text
//
// tessera.json_values of the Python package reads and writes the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/json/json_field.h"

namespace tessera::zero {

/// Writes values. Takes copies of nothing but what is on another device or not contiguous.
class StateValuesWriter {
 public:
  /// Returns what stands for the tensor in the values. Throws Error for a sparse one, and for a type that
  /// is none of fp64, fp32, fp16, bf16, int64, int32, int16, int8, uint8 and bool.
  nlohmann::json add(const at::Tensor& tensor);
  /// Throws what add() throws.
  static void check(const at::Tensor& tensor);
  /// All of it: (n) uint8 on the CPU. `values`: an object.
  at::Tensor finish(const nlohmann::json& values) const;

 private:
  std::vector<at::Tensor> parts_;
  int64_t size_ = 0;
};

/// Reads them. For untrusted bytes; all members throw Error, which begins with `what`.
class StateValuesReader {
 public:
  /// `data`: (n) uint8 on the CPU.
  StateValuesReader(const at::Tensor& data, std::string what);
  StateValuesReader(const StateValuesReader&) = delete;

  /// The object that was given to finish(). Refers to this.
  JsonField values() const;
  /// Whether the value stands for a tensor.
  static bool is_tensor(const JsonField& value);
  /// A copy, contiguous on the CPU.
  at::Tensor tensor(const JsonField& value) const;

 private:
  std::string what_;
  nlohmann::json document_;
  at::Tensor parts_;
};

}  // namespace tessera::zero

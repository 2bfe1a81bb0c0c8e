// TensorSet: samples in named tensors of one file, the first dimension counting them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "examples/torchscript/tensor_file.h"

namespace tessera::examples {

/// Owns the tensors, most of which are the file itself (tensor_file.h). Immutable; thread-safe.
class TensorSet {
 public:
  /// Local. `inputs`, at least one, and `target` (empty: none) are names in the file `path`. Throws DataError: the file or a
  /// tensor is missing or damaged, a tensor has no dimension, or they count different numbers of samples, or none.
  TensorSet(const std::string& path, const std::vector<std::string>& inputs, const std::string& target);

  int64_t size() const { return inputs_.front().stored.shape[0]; }
  /// Local. Copies of the samples of these numbers, on the CPU, in the file's type: each (B, …).
  std::vector<at::Tensor> inputs(const std::vector<int64_t>& numbers) const;
  /// Undefined without a target.
  at::Tensor target(const std::vector<int64_t>& numbers) const;

  /// "train.safetensors: 'y'", for messages.
  const std::string& target_name() const { return target_->name; }
  checkpoint::ElementType target_type() const { return target_->stored.type; }
  /// "train.safetensors: records 0 to 11", or the first of those that are no range.
  std::string describe_records(std::vector<int64_t> numbers) const;
  /// Local. Throws DataError naming the first tensor whose samples have another shape than `other`'s, a set of the same names, or another
  /// type than a model is given of it: floating types count as one, and so do integers of a target.
  void check_like(const TensorSet& other) const;
  /// Local. Throws DataError naming the first record of the target that is neither a class number below `num_classes` nor
  /// `ignored`. Reads the whole target.
  void check_labels(int64_t num_classes, int64_t ignored) const;

 private:
  struct Named {
    std::string name;  // as target_name()
    StoredTensor stored;
  };

  std::string path_;
  std::vector<Named> inputs_;
  std::optional<Named> target_;
};

}  // namespace tessera::examples

// TensorSet: samples in named tensors, indexed by their first dimension, from one file or several.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "examples/torchscript/data/tensor_file.h"

namespace tessera::examples {

/// Owns the tensors, most of which are the files themselves (tensor_file.h). The samples of several files are
/// numbered through, file after file. Immutable; thread-safe.
class TensorSet {
 public:
  /// `inputs`, at least one, and `target` (empty: none) are names in each of `files`, which
  /// are at least one. Throws DataError: a file or tensor is missing or damaged, a tensor has no
  /// dimension, a file's count different numbers of samples, or none, or files differ in a
  /// tensor's type or the shape of its samples.
  TensorSet(const std::vector<std::string>& files, const std::vector<std::string>& inputs,
            const std::string& target);

  int64_t size() const { return size_; }
  /// Copies of the samples of these numbers, on the CPU, in the file's type: each (B, …).
  std::vector<at::Tensor> inputs(const std::vector<int64_t>& numbers) const;
  /// Calls `visit` with targets of the samples number_of(0) … number_of(count - 1), in this order,
  /// some at a time (the target may be larger than the memory): `first` is the place of the first of them.
  void visit_targets(int64_t count, const std::function<int64_t(int64_t)>& number_of,
                     const std::function<void(int64_t first, const at::Tensor& targets)>& visit) const;
  /// Undefined without a target.
  at::Tensor target(const std::vector<int64_t>& numbers) const;

  /// "train.safetensors: 'y'" of the first file, for messages.
  std::string target_name() const;
  DType target_type() const { return parts_.front().target->type; }
  /// Returns the shape of one sample's target.
  std::vector<int64_t> target_shape() const;
  /// "train.safetensors: records 0 to 11", or the first of those that are no
  /// range; by file where there are several.
  std::string describe_records(std::vector<int64_t> numbers) const;
  /// Throws DataError naming the first tensor whose samples have another shape than `other`'s,
  /// a set of the same names, or another type than a model is given of it: floating types count as
  /// one, and so do integers of a target.
  void check_like(const TensorSet& other) const;
  /// Throws DataError naming the first record of the target that is neither a class number below
  /// `num_classes` nor `ignored`. Reads the whole target.
  void check_labels(int64_t num_classes, int64_t ignored) const;

 private:
  struct Part {  // one file
    std::string path;
    int64_t begin = 0;  // number of its first sample
    std::vector<StoredTensor> inputs;
    std::optional<StoredTensor> target;

    int64_t size() const { return inputs.front().shape[0]; }
  };
  using Choice = std::function<const StoredTensor&(const Part&)>;
  Part open(const std::string& path, int64_t begin) const;
  const Part& part_of(int64_t number) const;
  at::Tensor rows(const std::vector<int64_t>& numbers, const Choice& choice) const;
  std::string name_in(const Part& part, const std::string& name) const;

  std::vector<std::string> input_names_;
  std::string target_name_;  // empty: none
  std::vector<Part> parts_;  // at least one
  int64_t size_ = 0;
};

}  // namespace tessera::examples

#include "examples/torchscript/dataset.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "core/error.h"
#include "core/str.h"
#include "core/utf8.h"
#include "engine/checkpoint_types.h"

namespace tessera::examples {
namespace {

std::string name_in(const std::string& path, const std::string& name) { return str(path, ": ", quoted_name(name)); }

StoredTensor load(const TensorFile& file, const std::string& path, const std::string& name) {
  StoredTensor stored = file.tensor(name);
  if (stored.shape.empty())
    throw DataError(str(name_in(path, name), " is a single number; expected a tensor whose first dimension counts samples"));
  if (stored.shape[0] == 0) throw DataError(str(name_in(path, name), " has no samples: its shape is ", describe_shape(stored.shape)));
  return stored;
}

at::Tensor rows(const StoredTensor& stored, const std::vector<int64_t>& numbers) {
  std::vector<int64_t> shape = stored.shape;
  shape[0] = static_cast<int64_t>(numbers.size());
  at::Tensor batch = at::empty(shape, to_torch(stored.type));
  if (batch.numel() == 0) return batch;
  const size_t row_bytes = batch.nbytes() / numbers.size();
  auto* to = static_cast<std::byte*>(batch.data_ptr());
  for (const int64_t number : numbers) {
    TESSERA_CHECK(number >= 0 && number < stored.shape[0], "sample ", number);
    std::memcpy(to, stored.data.get() + static_cast<size_t>(number) * row_bytes, row_bytes);
    to += row_bytes;
  }
  return batch;
}

}  // namespace

TensorSet::TensorSet(const std::string& path, const std::vector<std::string>& inputs, const std::string& target) {
  const TensorFile file(path);
  std::vector<std::string> names = inputs;
  if (!target.empty()) names.push_back(target);
  for (const std::string& name : names) {
    StoredTensor tensor = load(file, path, name);
    if (!inputs_.empty() && tensor.shape[0] != size())
      throw DataError(str(name_in(path, name), " has ", format_count(tensor.shape[0]), " samples, but ", quoted_name(names.front()),
                          " has ", format_count(size()), "; expected as many of each"));
    inputs_.push_back(std::move(tensor));
  }
  if (target.empty()) return;
  target_ = std::move(inputs_.back());
  target_name_ = name_in(path, target);
  inputs_.pop_back();
}

std::vector<at::Tensor> TensorSet::inputs(const std::vector<int64_t>& numbers) const {
  std::vector<at::Tensor> batch;
  for (const StoredTensor& tensor : inputs_) batch.push_back(rows(tensor, numbers));
  return batch;
}

at::Tensor TensorSet::target(const std::vector<int64_t>& numbers) const {
  return target_ ? rows(*target_, numbers) : at::Tensor();
}

void TensorSet::check_labels(int64_t num_classes, int64_t ignored) const {
  constexpr int64_t kRows = 1 << 16;  // at once: the target may be larger than the memory
  for (int64_t begin = 0; begin < size(); begin += kRows) {
    std::vector<int64_t> numbers(static_cast<size_t>(std::min(kRows, size() - begin)));
    std::iota(numbers.begin(), numbers.end(), begin);
    const at::Tensor part = target(numbers).to(at::kLong);
    const at::Tensor wrong = part.lt(0).logical_or_(part.ge(num_classes)).logical_and_(part.ne(ignored));
    if (!wrong.any().item<bool>()) continue;
    const int64_t record = begin + wrong.nonzero()[0][0].item<int64_t>();
    throw DataError(str(target_name_, ": record ", record, " holds ", part.masked_select(wrong)[0].item<int64_t>(), "; expected 0 to ",
                        num_classes - 1, ", as the model gives ", num_classes, num_classes == 1 ? " class" : " classes", " (or ", ignored,
                        ", which is not counted)"));
  }
}

}  // namespace tessera::examples

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

/// Whether a model is given both alike: floating types in the one it computes in, targets of integers as int64.
bool given_alike(checkpoint::ElementType a, checkpoint::ElementType b, bool is_target) {
  const at::ScalarType first = to_torch(a), second = to_torch(b);
  if (at::isFloatingType(first) && at::isFloatingType(second)) return true;
  const auto is_integer = [](at::ScalarType type) { return at::isIntegralType(type, /*includeBool=*/false); };
  return first == second || (is_target && is_integer(first) && is_integer(second));
}

}  // namespace

TensorSet::TensorSet(const std::string& path, const std::vector<std::string>& inputs, const std::string& target) : path_(path) {
  const TensorFile file(path);
  std::vector<std::string> names = inputs;
  if (!target.empty()) names.push_back(target);
  for (const std::string& name : names) {
    StoredTensor tensor = load(file, path, name);
    if (!inputs_.empty() && tensor.shape[0] != size())
      throw DataError(str(name_in(path, name), " has ", format_count(tensor.shape[0]), " samples, but ", quoted_name(names.front()),
                          " has ", format_count(size()), "; expected as many of each"));
    inputs_.push_back({name_in(path, name), std::move(tensor)});
  }
  if (target.empty()) return;
  target_ = std::move(inputs_.back());
  inputs_.pop_back();
}

std::vector<at::Tensor> TensorSet::inputs(const std::vector<int64_t>& numbers) const {
  std::vector<at::Tensor> batch;
  for (const Named& input : inputs_) batch.push_back(rows(input.stored, numbers));
  return batch;
}

at::Tensor TensorSet::target(const std::vector<int64_t>& numbers) const {
  return target_ ? rows(target_->stored, numbers) : at::Tensor();
}

std::string TensorSet::describe_records(std::vector<int64_t> numbers) const {
  constexpr size_t kShown = 32;
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  const size_t count = numbers.size();
  if (count == 0) return path_;
  if (count == 1) return str(path_, ": record ", numbers[0]);
  if (numbers.back() - numbers.front() + 1 == static_cast<int64_t>(count))
    return str(path_, ": records ", numbers.front(), " to ", numbers.back());
  numbers.resize(std::min(count, kShown));
  return str(path_, ": records ", join(numbers, ", "), count > kShown ? str(" and ", count - kShown, " more") : "");
}

void TensorSet::check_like(const TensorSet& other) const {
  const auto check = [&](const Named& mine, const Named& theirs, bool is_target) {
    const std::vector<int64_t> found(mine.stored.shape.begin() + 1, mine.stored.shape.end());
    const std::vector<int64_t> expected(theirs.stored.shape.begin() + 1, theirs.stored.shape.end());
    if (found != expected)
      throw DataError(str(mine.name, " has samples of shape ", describe_shape(found), "; expected ", describe_shape(expected), ", as in ",
                          other.path_));
    if (!given_alike(mine.stored.type, theirs.stored.type, is_target))
      throw DataError(str(mine.name, " is of type ", checkpoint::name_of(mine.stored.type), "; expected ",
                          checkpoint::name_of(theirs.stored.type), ", as in ", other.path_));
  };
  TESSERA_CHECK(inputs_.size() == other.inputs_.size() && target_.has_value() == other.target_.has_value());
  for (size_t i = 0; i < inputs_.size(); ++i) check(inputs_[i], other.inputs_[i], /*is_target=*/false);
  if (target_) check(*target_, *other.target_, /*is_target=*/true);
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
    throw DataError(str(target_name(), ": record ", record, " holds ", part.masked_select(wrong)[0].item<int64_t>(), "; expected 0 to ",
                        num_classes - 1, ", as the model gives ", num_classes, num_classes == 1 ? " class" : " classes", " (or ", ignored,
                        ", which is not counted)"));
  }
}

}  // namespace tessera::examples

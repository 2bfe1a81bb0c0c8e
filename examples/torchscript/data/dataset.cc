#include "examples/torchscript/data/dataset.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "core/error.h"
#include "core/str.h"
#include "core/utf8.h"
#include "engine/checkpoint/checkpoint_types.h"

namespace tessera::examples {
namespace {

StoredTensor load(const TensorFile& file, const std::string& path, const std::string& name) {
  StoredTensor stored = file.tensor(name);
  const std::string shown = str(path, ": ", quoted_name(name));
  if (stored.shape.empty())
    throw DataError(shown, " is a single number; expected a tensor whose first dimension counts samples");
  if (stored.shape[0] == 0)
    throw DataError(shown, " has no samples: its shape is ", describe_shape(stored.shape));
  return stored;
}

std::vector<int64_t> sample_shape(const StoredTensor& stored) {
  return {stored.shape.begin() + 1, stored.shape.end()};
}

/// "record 3", "records 0 to 11", "records 1, 5, 8 and 2 more", of sorted numbers.
std::string describe_numbers(std::vector<int64_t> numbers) {
  constexpr size_t kShown = 32;
  const size_t count = numbers.size();
  if (count == 1) return str("record ", numbers[0]);
  if (numbers.back() - numbers.front() + 1 == static_cast<int64_t>(count))
    return str("records ", numbers.front(), " to ", numbers.back());
  numbers.resize(std::min(count, kShown));
  return str("records ", join(numbers, ", "), count > kShown ? str(" and ", count - kShown, " more") : "");
}

/// Whether a model gets both in the same type: floating types in its compute type, integer targets as int64.
bool given_alike(DType a, DType b, bool is_target) {
  const at::ScalarType first = to_torch(a), second = to_torch(b);
  if (at::isFloatingType(first) && at::isFloatingType(second)) return true;
  const auto is_integer = [](at::ScalarType type) { return at::isIntegralType(type, /*includeBool=*/false); };
  return first == second || (is_target && is_integer(first) && is_integer(second));
}

}  // namespace

TensorSet::TensorSet(const std::vector<std::string>& files, const std::vector<std::string>& inputs,
                     const std::string& target)
    : input_names_(inputs), target_name_(target) {
  for (const std::string& path : files) {
    Part part = open(path, size_);
    size_ += part.size();
    parts_.push_back(std::move(part));
  }
  const auto check = [&](const Part& part, const StoredTensor& mine, const StoredTensor& first,
                         const std::string& name) {
    if (sample_shape(mine) != sample_shape(first))
      throw DataError(name_in(part, name), " has samples of shape ", describe_shape(sample_shape(mine)),
                      "; expected ", describe_shape(sample_shape(first)), ", as in ", files.front());
    if (mine.type != first.type)
      throw DataError(name_in(part, name), " is of type ", name_of(mine.type), "; expected ",
                      name_of(first.type), ", as in ", files.front());
  };
  for (const Part& part : parts_) {
    for (size_t i = 0; i < inputs.size(); ++i)
      check(part, part.inputs[i], parts_.front().inputs[i], inputs[i]);
    if (part.target) check(part, *part.target, *parts_.front().target, target);
  }
}

TensorSet::Part TensorSet::open(const std::string& path, int64_t begin) const {
  const TensorFile file(path);
  Part part{.path = path, .begin = begin, .inputs = {}, .target = {}};
  const auto take = [&](const std::string& name) {
    StoredTensor tensor = load(file, path, name);
    if (!part.inputs.empty() && tensor.shape[0] != part.size())
      throw DataError(name_in(part, name), " has ", format_count(tensor.shape[0]), " samples, but ",
                      quoted_name(input_names_.front()), " has ", format_count(part.size()),
                      "; expected as many of each");
    return tensor;
  };
  for (const std::string& name : input_names_) part.inputs.push_back(take(name));
  if (!target_name_.empty()) part.target = take(target_name_);
  return part;
}

std::string TensorSet::name_in(const Part& part, const std::string& name) const {
  return str(part.path, ": ", quoted_name(name));
}
std::string TensorSet::target_name() const { return name_in(parts_.front(), target_name_); }
std::vector<int64_t> TensorSet::target_shape() const { return sample_shape(*parts_.front().target); }

const TensorSet::Part& TensorSet::part_of(int64_t number) const {
  TESSERA_CHECK(number >= 0 && number < size_, "sample ", number);
  return *std::prev(std::upper_bound(parts_.begin(), parts_.end(), number,
                                     [](int64_t at, const Part& part) { return at < part.begin; }));
}

at::Tensor TensorSet::rows(const std::vector<int64_t>& numbers, const Choice& choice) const {
  const StoredTensor& first = choice(parts_.front());
  std::vector<int64_t> shape = first.shape;
  shape[0] = static_cast<int64_t>(numbers.size());
  at::Tensor batch = at::empty(shape, to_torch(first.type));
  if (batch.numel() == 0) return batch;
  const size_t row_bytes = batch.nbytes() / numbers.size();
  auto* to = static_cast<std::byte*>(batch.data_ptr());
  for (const int64_t number : numbers) {
    const Part& part = part_of(number);
    std::memcpy(to, choice(part).data.get() + static_cast<size_t>(number - part.begin) * row_bytes,
                row_bytes);
    to += row_bytes;
  }
  return batch;
}

std::vector<at::Tensor> TensorSet::inputs(const std::vector<int64_t>& numbers) const {
  std::vector<at::Tensor> batch;
  for (size_t i = 0; i < input_names_.size(); ++i)
    batch.push_back(rows(numbers, [i](const Part& part) -> const StoredTensor& { return part.inputs[i]; }));
  return batch;
}

at::Tensor TensorSet::target(const std::vector<int64_t>& numbers) const {
  if (target_name_.empty()) return {};
  return rows(numbers, [](const Part& part) -> const StoredTensor& { return *part.target; });
}

std::string TensorSet::describe_records(std::vector<int64_t> numbers) const {
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  if (numbers.empty()) return parts_.front().path;
  std::vector<std::string> files;
  for (auto begin = numbers.begin(); begin != numbers.end();) {
    const Part& part = part_of(*begin);
    const auto end = std::lower_bound(begin, numbers.end(), part.begin + part.size());
    std::vector<int64_t> in_file(begin, end);
    for (int64_t& number : in_file) number -= part.begin;
    files.push_back(str(part.path, ": ", describe_numbers(std::move(in_file))));
    begin = end;
  }
  return join(files, "; ");
}

void TensorSet::check_like(const TensorSet& other) const {
  const Part &part = parts_.front(), &expected = other.parts_.front();
  const auto check = [&](const StoredTensor& mine, const StoredTensor& theirs, const std::string& name,
                         bool is_target) {
    if (sample_shape(mine) != sample_shape(theirs))
      throw DataError(name_in(part, name), " has samples of shape ", describe_shape(sample_shape(mine)),
                      "; expected ", describe_shape(sample_shape(theirs)), ", as in ", expected.path);
    if (!given_alike(mine.type, theirs.type, is_target))
      throw DataError(name_in(part, name), " is of type ", name_of(mine.type), "; expected ",
                      name_of(theirs.type), ", as in ", expected.path);
  };
  TESSERA_CHECK(input_names_ == other.input_names_ && target_name_ == other.target_name_);
  for (size_t i = 0; i < input_names_.size(); ++i)
    check(part.inputs[i], expected.inputs[i], input_names_[i], /*is_target=*/false);
  if (part.target) check(*part.target, *expected.target, target_name_, /*is_target=*/true);
}

void TensorSet::visit_targets(int64_t count, const std::function<int64_t(int64_t)>& number_of,
                              const std::function<void(int64_t, const at::Tensor&)>& visit) const {
  constexpr int64_t kNumel = int64_t{1} << 22;
  const std::vector<int64_t> shape = target_shape();
  const int64_t row_numel = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  const int64_t at_once = std::max<int64_t>(1, kNumel / std::max<int64_t>(1, row_numel));
  for (int64_t begin = 0; begin < count; begin += at_once) {
    std::vector<int64_t> numbers;
    for (int64_t i = begin; i < std::min(begin + at_once, count); ++i) numbers.push_back(number_of(i));
    visit(begin, target(numbers));
  }
}

void TensorSet::check_labels(int64_t num_classes, int64_t ignored) const {
  const auto same = [](int64_t number) { return number; };
  visit_targets(size(), same, [&](int64_t first, const at::Tensor& targets) {
    const at::Tensor labels = targets.to(at::kLong);
    const at::Tensor wrong =
        labels.lt(0).logical_or_(labels.ge(num_classes)).logical_and_(labels.ne(ignored));
    if (!wrong.any().item<bool>()) return;
    const int64_t number = first + wrong.nonzero()[0][0].item<int64_t>();
    const Part& part = part_of(number);
    throw DataError(name_in(part, target_name_), ": record ", number - part.begin, " holds ",
                    labels.masked_select(wrong)[0].item<int64_t>(), "; expected 0 to ", num_classes - 1,
                    ", as the model gives ", num_classes, num_classes == 1 ? " class" : " classes", " (or ",
                    ignored, ", which is not counted)");
  });
}

}  // namespace tessera::examples

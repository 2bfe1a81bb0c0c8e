#include "examples/text_classification/encoded_texts.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "core/check.h"

namespace tessera::examples {

void EncodedTexts::add(std::span<const int32_t> ids) {
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  ends_.push_back(num_tokens());
}

std::span<const int32_t> EncodedTexts::operator[](int64_t index) const {
  TESSERA_CHECK(index >= 0 && index < size(), "text ", index, " of ", size());
  const int64_t begin = index == 0 ? 0 : ends_[static_cast<size_t>(index) - 1];
  return std::span(ids_).subspan(static_cast<size_t>(begin),
                                 static_cast<size_t>(ends_[static_cast<size_t>(index)] - begin));
}

PaddedTexts EncodedTexts::batch(const std::vector<int64_t>& indices, int32_t pad, int64_t max_length) const {
  constexpr int64_t kMultiple = 8;
  int64_t longest = 1;
  for (const int64_t index : indices)
    longest = std::max(longest, static_cast<int64_t>((*this)[index].size()));
  TESSERA_CHECK(longest <= max_length, longest, " tokens, more than ", max_length);
  const int64_t length = std::min((longest + kMultiple - 1) / kMultiple * kMultiple, max_length);
  const auto num_rows = static_cast<int64_t>(indices.size());
  PaddedTexts rows{at::full({num_rows, length}, pad, at::kLong), at::zeros({num_rows, length}, at::kBool)};
  for (int64_t row = 0; row < num_rows; ++row) {
    const std::span<const int32_t> ids = (*this)[indices[static_cast<size_t>(row)]];
    std::copy(ids.begin(), ids.end(), rows.input_ids.mutable_data_ptr<int64_t>() + row * length);
    std::fill_n(rows.attention_mask.mutable_data_ptr<bool>() + row * length, ids.size(), true);
  }
  return rows;
}

}  // namespace tessera::examples

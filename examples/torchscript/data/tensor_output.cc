#include "examples/torchscript/data/tensor_output.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <numeric>
#include <system_error>

#include "core/check.h"
#include "core/csv_field.h"
#include "core/error.h"
#include "core/str.h"
#include "core/utf8.h"
#include "engine/checkpoint/checkpoint_types.h"

namespace tessera::examples {
namespace {

constexpr int64_t kMaxCsvColumns = 16'384;  // the limit of spreadsheets

int64_t numel_of(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

/// "logits" of one element a row; "logits_0" …, "logits_1_2" of more.
std::string column_name(const std::string& name, const std::vector<int64_t>& shape, int64_t element) {
  std::string place;
  for (size_t i = shape.size(); i-- > 0; element /= shape[i]) place = str("_", element % shape[i], place);
  return csv_field(name + place);
}

/// The shortest text that reads back as the same number.
template <class T>
void append_number(std::string& text, T value) {
  if constexpr (std::is_same_v<T, bool>) {
    text += value ? '1' : '0';
  } else {
    std::array<char, 32> digits;
    const auto result = std::to_chars(digits.data(), digits.data() + digits.size(), value);
    text.append(digits.data(), result.ptr);
  }
}

}  // namespace

TensorOutput::TensorOutput(std::filesystem::path path, int64_t num_rows)
    : path_(std::move(path)), num_rows_(num_rows), is_csv_(path_.extension() == ".csv") {
  if (!is_csv_ && !checkpoint::model_format_of(path_))
    throw ConfigError("--out ", path_, ": expected a name that ends in .safetensors, .csv, .h5 or .pt");
  // A CSV file is written at the end, which may be hours later.
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path folder = path_.parent_path().empty() ? fs::path(".") : path_.parent_path();
  const char* const why = fs::is_directory(path_, error)         ? "is a folder"
                          : !fs::exists(folder, error) && !error ? "its folder does not exist"
                          : !fs::is_directory(folder, error)     ? "its folder is none, or cannot be read"
                          : ::access(folder.c_str(), W_OK) != 0  ? "its folder cannot be written"
                                                                 : nullptr;
  if (why != nullptr)
    throw ConfigError("--out ", path_, ": ", why,
                      "; expected the name of a file in a folder that exists and can be written");
}

void TensorOutput::begin(const std::vector<std::pair<std::string, at::Tensor>>& rows) {
  std::vector<checkpoint::ModelTensor> tensors;
  int64_t num_columns = 0;
  for (const auto& [name, tensor] : rows) {
    columns_.push_back({.name = name,
                        .shape = {tensor.sizes().begin() + 1, tensor.sizes().end()},
                        .type = tensor.scalar_type(),
                        .held = {}});
    num_columns += numel_of(columns_.back().shape);
    std::vector<int64_t> shape = tensor.sizes().vec();
    shape[0] = num_rows_;
    tensors.push_back(
        {.name = name, .shape = std::move(shape), .type = dtype_of(tensor, name), .aliases = {}});
  }
  if (!is_csv_) {
    writer_ = checkpoint::open_model_writer(
        disk_, {.format = *checkpoint::model_format_of(path_), .path = path_, .tensors = std::move(tensors)});
  } else if (num_columns > kMaxCsvColumns) {
    throw ConfigError("--out ", path_, ": would have ", format_count(num_columns),
                      " columns; expected at most ", format_count(kMaxCsvColumns),
                      ", or a .safetensors file");
  }
}

void TensorOutput::add(const std::vector<std::pair<std::string, at::Tensor>>& rows,
                       const std::string& origin) {
  if (columns_.empty()) begin(rows);
  const auto describe = [](const std::string& name, at::ScalarType type, at::IntArrayRef shape) {
    return tessera::str(quoted_name(name), " ", at::toString(type), " ", describe_shape(shape));
  };
  for (size_t i = 0; i < std::max(rows.size(), columns_.size()); ++i) {
    const std::string found = i < rows.size() ? describe(rows[i].first, rows[i].second.scalar_type(),
                                                         rows[i].second.sizes().slice(1))
                                              : "nothing";
    const std::string expected =
        i < columns_.size() ? describe(columns_[i].name, columns_[i].type, columns_[i].shape) : "nothing";
    if (found != expected)
      throw DataError(origin, ": forward gives ", found, " for each sample of this batch; expected ",
                      expected, ", as before");
    if (writer_ && i == 0)
      writer_->append(bytes_of(rows[i].second));
    else
      columns_[i].held.push_back(rows[i].second);
  }
}

std::vector<train::PredictedTensor> TensorOutput::finish() {
  if (writer_) {
    for (const Column& column : columns_)
      for (const at::Tensor& rows : column.held) writer_->append(bytes_of(rows));
    writer_->finish();
  } else {
    disk_.replace_file(path_, csv());
  }
  std::vector<train::PredictedTensor> held;
  for (const Column& column : columns_) {
    held.push_back({column.name, column.shape});
    held.back().shape.insert(held.back().shape.begin(), num_rows_);
  }
  return held;
}

std::string TensorOutput::csv() const {
  std::vector<at::Tensor> whole;
  std::string text;
  for (const Column& column : columns_) {
    whole.push_back(at::cat(column.held).reshape({num_rows_, -1}));
    for (int64_t element = 0; element < whole.back().size(1); ++element)
      text += (text.empty() ? "" : ",") + column_name(column.name, column.shape, element);
  }
  for (int64_t row = 0; row < num_rows_; ++row) {
    text += '\n';
    bool first = true;
    for (const at::Tensor& tensor : whole) {
      AT_DISPATCH_ALL_TYPES_AND(at::kBool, tensor.scalar_type(), "csv", [&] {
        const scalar_t* values = tensor.const_data_ptr<scalar_t>() + row * tensor.size(1);
        for (int64_t i = 0; i < tensor.size(1); ++i) {
          if (!std::exchange(first, false)) text += ',';
          append_number(text, values[i]);
        }
      });
    }
  }
  return text + "\n";
}

}  // namespace tessera::examples

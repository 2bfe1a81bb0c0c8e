#include "examples/language_model/text.h"

#include <ATen/ATen.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "core/str.h"

namespace tessera::examples {

ByteText::ByteText(const std::string& path, int64_t sequence) : sequence_(sequence) {
  std::error_code error;
  const auto size = std::filesystem::is_regular_file(path, error) ? std::filesystem::file_size(path, error) : 0;
  std::ifstream file(path, std::ios::binary);
  if (error || !file || !std::filesystem::is_regular_file(path)) throw DataError(str(path, ": cannot be read; expected a text file (data.path)"));
  if (static_cast<int64_t>(size) < sequence + 1)
    throw DataError(str(path, ": has ", size, " bytes; expected at least ", sequence + 1, ", one sample (model.sequence and the byte after)"));
  bytes_ = at::from_file(path, /*shared=*/false, static_cast<int64_t>(size), at::kByte);
}

at::Tensor ByteText::windows(const std::vector<int64_t>& numbers) const {
  at::Tensor rows = at::empty({static_cast<int64_t>(numbers.size()), sequence_ + 1}, at::kLong);
  for (size_t row = 0; row < numbers.size(); ++row)
    rows[static_cast<int64_t>(row)].copy_(bytes_.narrow(0, numbers[row] * sequence_, sequence_ + 1));
  return rows;
}

}  // namespace tessera::examples

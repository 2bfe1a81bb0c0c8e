#include "examples/language_model/text.h"

#include <ATen/ATen.h>

#include "core/error.h"
#include "core/files/input_file.h"

namespace tessera::examples {

ByteText::ByteText(const std::string& path, int64_t sequence) : sequence_(sequence) {
  int64_t size = 0;
  try {
    size = InputFile(path).bytes();
  } catch (const DiskError& error) {
    throw DataError(path, ": cannot be read: ", error.reason(), "; expected a text file (data.path)");
  }
  if (size < sequence + 1)
    throw DataError(path, ": has ", size, " bytes; expected at least ", sequence + 1,
                    ", one sample (model.sequence and the byte after)");
  bytes_ = at::from_file(path, /*shared=*/false, size, at::kByte);
}

at::Tensor ByteText::windows(const std::vector<int64_t>& numbers) const {
  at::Tensor rows = at::empty({static_cast<int64_t>(numbers.size()), sequence_ + 1}, at::kLong);
  for (size_t row = 0; row < numbers.size(); ++row)
    rows[static_cast<int64_t>(row)].copy_(bytes_.narrow(0, numbers[row] * sequence_, sequence_ + 1));
  return rows;
}

}  // namespace tessera::examples

// Bytes as a file of torch.save: refused, or every tensor that can be described lies in it.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/formats/torch_file.h"
#include "core/error.h"
#include "core/str.h"

namespace {

using namespace tessera::checkpoint;

void check(const TorchTensor& tensor, size_t file_bytes) {
  if (tensor.shape.size() != tensor.strides.size() || tensor.numel() < 0) __builtin_trap();
  if (tensor.numel() == 0) return;
  __int128 last = tensor.offset;
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    if (tensor.strides[d] < 0) __builtin_trap();
    last += static_cast<__int128>(tensor.shape[d] - 1) * tensor.strides[d] * tessera::size_bytes(tensor.type);
  }
  if (tensor.offset < 0 || last + tessera::size_bytes(tensor.type) > static_cast<__int128>(file_bytes))
    __builtin_trap();
  tensor.is_contiguous();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int memory = ::memfd_create("torch_file_fuzz", 0);
  static const std::string path = tessera::str("/proc/self/fd/", memory);
  if (::ftruncate(memory, 0) != 0 || ::pwrite(memory, data, size, 0) != static_cast<ssize_t>(size)) return -1;
  const bool is_recognized = TorchFile::recognizes(path);
  try {
    const TorchFile file{std::filesystem::path(path)};
    if (!is_recognized) __builtin_trap();
    std::set<const PickleValue*> seen = {&file.root()};
    std::vector<const PickleValue*> next = {&file.root()};
    while (!next.empty()) {
      const PickleValue& value = *next.back();
      next.pop_back();
      try {
        if (const auto tensor = file.tensor(value)) check(*tensor, size);
      } catch (const tessera::Error&) {
      }
      const auto add = [&](const PickleValue* inner) {
        if (inner != nullptr && seen.insert(inner).second) next.push_back(inner);
      };
      add(value.arguments);
      add(value.state);
      for (const PickleValue* item : value.items) add(item);
    }
    file.verify();
  } catch (const tessera::Error&) {
  }
  return 0;
}

// Bytes as a .safetensors file: refused, or every tensor of it can be read, and the header that is written
// from what was understood is understood as the same.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/formats/safetensors.h"
#include "core/error.h"
#include "core/str.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera;
  static const int memory = ::memfd_create("safetensors_fuzz", 0);
  static const std::string path = str("/proc/self/fd/", memory);
  if (::ftruncate(memory, 0) != 0 || ::pwrite(memory, data, size, 0) != static_cast<ssize_t>(size)) return -1;
  try {
    const checkpoint::SafetensorsFile file(path);
    int64_t end = 0;
    for (const checkpoint::SafetensorsTensor& tensor : file.tensors()) {
      std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes));
      file.read_at(tensor.offset, bytes);
      if (!std::equal(bytes.begin(), bytes.end(), reinterpret_cast<const std::byte*>(data) + tensor.offset))
        __builtin_trap();
      if (tensor.offset < end || file.find(tensor.name) != &tensor) __builtin_trap();
      end = tensor.offset + tensor.bytes;
    }
    if (!file.tensors().empty() && end != static_cast<int64_t>(size)) __builtin_trap();
  } catch (const Error&) {
  }
  return 0;
}

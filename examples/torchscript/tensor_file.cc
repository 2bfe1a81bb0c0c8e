#include "examples/torchscript/tensor_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "checkpoint/formats/safetensors_reader.h"
#include "checkpoint/hdf5_reader.h"
#include "core/error.h"
#include "core/file_descriptor.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::examples {
namespace {

namespace fs = std::filesystem;
using checkpoint::Hdf5File;
using checkpoint::SafetensorsFile;

/// The whole file as memory that is only read.
class Mapping {
 public:
  explicit Mapping(const fs::path& path) {
    const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status {};
    if (file.get() < 0 || ::fstat(file.get(), &status) != 0) fail(path);
    bytes_ = status.st_size;
    memory_ = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ, MAP_SHARED, file.get(), 0);
    if (memory_ == MAP_FAILED) fail(path);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { ::munmap(memory_, static_cast<size_t>(bytes_)); }

  const std::byte* data() const { return static_cast<const std::byte*>(memory_); }
  int64_t bytes() const { return bytes_; }

 private:
  [[noreturn]] static void fail(const fs::path& path) { throw DataError(str("cannot map ", path.string(), ": ", std::strerror(errno))); }

  void* memory_ = MAP_FAILED;
  int64_t bytes_ = 0;
};

std::string names_there_are(const std::vector<std::string>& names) {
  constexpr size_t kShown = 10;
  std::vector<std::string> shown;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) shown.push_back(quoted_name(names[i]));
  if (names.size() > kShown) shown.push_back(str(names.size() - kShown, " more"));
  return names.empty() ? "none" : join(shown, ", ");
}

}  // namespace

struct TensorFile::Source {
  std::optional<SafetensorsFile> safetensors;
  std::optional<Hdf5File> hdf5;
  std::shared_ptr<const Mapping> mapping;

  std::vector<std::string> names() const {
    if (hdf5) return hdf5->names();
    std::vector<std::string> names;
    for (const checkpoint::SafetensorsTensor& tensor : safetensors->tensors()) names.push_back(tensor.name);
    std::sort(names.begin(), names.end());
    return names;
  }
};

TensorFile::TensorFile(const fs::path& path) : path_(path), source_(std::make_unique<Source>()) {
  const std::string ending = path.extension().string();
  const bool hdf5 = ending == ".h5" || ending == ".hdf5";
  if (!hdf5 && ending != ".safetensors")
    throw DataError(str(path.string(), ": its name ends in ", quoted_name(ending), "; expected a .safetensors, .h5 or .hdf5 file"));
  try {
    if (hdf5) source_->hdf5.emplace(path);
    else source_->safetensors.emplace(path);
  } catch (const Error& error) {
    throw DataError(error.what());
  }
  source_->mapping = std::make_shared<Mapping>(path);  // neither kind of file is ever empty
}

TensorFile::~TensorFile() = default;

StoredTensor TensorFile::tensor(const std::string& name) const try {
  const std::vector<std::string> names = source_->names();
  if (std::find(names.begin(), names.end(), name) == names.end())
    throw DataError(str(path_.string(), ": has no tensor ", quoted_name(name), "; it holds ", names_there_are(names)));
  if (source_->hdf5) {
    const checkpoint::Hdf5Stored stored = source_->hdf5->find(name);
    return take(name, {stored.type, stored.shape, nullptr}, stored.bytes, stored.offset,
                [&](std::span<std::byte> destination) { source_->hdf5->read(stored, destination); });
  }
  const checkpoint::SafetensorsTensor& stored = *source_->safetensors->find(name);
  return take(name, {stored.type, stored.shape, nullptr}, stored.bytes, stored.offset,
              [&](std::span<std::byte> destination) { source_->safetensors->read(stored, 0, destination); });
} catch (const DataError&) {
  throw;
} catch (const Error& error) {
  throw DataError(error.what());
}

StoredTensor TensorFile::take(const std::string& name, StoredTensor tensor, int64_t bytes, std::optional<int64_t> offset,
                              const std::function<void(std::span<std::byte>)>& read) const {
  const std::shared_ptr<const Mapping>& mapping = source_->mapping;
  if (offset && *offset > mapping->bytes() - bytes)
    throw DataError(str(path_.string(), ": ", quoted_name(name), " ends behind the end of the file (it is truncated)"));
  if (offset) {
    tensor.data = {mapping, mapping->data() + *offset};
    tensor.mapped = true;
    return tensor;
  }
  const std::shared_ptr<std::byte> own(new std::byte[static_cast<size_t>(bytes)], std::default_delete<std::byte[]>());
  read({own.get(), static_cast<size_t>(bytes)});
  tensor.data = own;
  return tensor;
}

}  // namespace tessera::examples

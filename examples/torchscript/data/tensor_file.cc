#include "examples/torchscript/data/tensor_file.h"

#include <algorithm>
#include <new>
#include <optional>

#include "checkpoint/formats/safetensors.h"
#include "checkpoint/hdf5/hdf5_reader.h"
#include "core/error.h"
#include "core/files/mapped_file.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::examples {
namespace {

namespace fs = std::filesystem;
using checkpoint::Hdf5File;
using checkpoint::SafetensorsFile;

std::string names_there_are(const std::vector<std::string>& names) {
  constexpr size_t kShown = 10;
  std::vector<std::string> shown;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) shown.push_back(quoted_name(names[i]));
  if (names.size() > kShown) shown.push_back(str(names.size() - kShown, " more"));
  return names.empty() ? "none" : join(shown, ", ");
}

/// Returns what `body` returns. Every exception of it becomes a DataError that names the file.
template <class Body>
auto with_file_name(const fs::path& path, const Body& body) {
  try {
    return body();
  } catch (const DataError&) {
    throw;
  } catch (const Error& error) {
    throw DataError(error.what());
  } catch (const std::bad_alloc&) {
    throw DataError(path, ": there is not enough memory for what it says to hold");
  } catch (const std::exception& error) {
    throw DataError(path, ": cannot be read: ", error.what());
  }
}

}  // namespace

struct TensorFile::Source {
  std::optional<SafetensorsFile> safetensors;
  std::optional<Hdf5File> hdf5;
  std::shared_ptr<const MappedFile> mapping;

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
    throw DataError(path, ": its name ends in ", quoted_name(ending),
                    "; expected a .safetensors, .h5 or .hdf5 file");
  with_file_name(path_, [&] {
    if (hdf5)
      source_->hdf5.emplace(path);
    else
      source_->safetensors.emplace(path);
    source_->mapping = std::make_shared<MappedFile>(path);  // files of both formats are never empty
  });
}

TensorFile::~TensorFile() = default;

StoredTensor TensorFile::tensor(const std::string& name) const {
  return with_file_name(path_, [&] { return find(name); });
}

StoredTensor TensorFile::find(const std::string& name) const {
  const bool is_there =
      source_->hdf5 ? source_->hdf5->has(name) : source_->safetensors->find(name) != nullptr;
  if (!is_there)
    throw DataError(path_, ": has no tensor ", quoted_name(name), "; it holds ",
                    names_there_are(source_->names()));
  if (source_->hdf5) {
    const checkpoint::Hdf5Stored stored = source_->hdf5->find(name);
    return take(name, {stored.type, stored.shape, nullptr}, stored.bytes, stored.offset,
                [&](std::span<std::byte> destination) { source_->hdf5->read(stored, destination); });
  }
  const checkpoint::SafetensorsTensor& stored = *source_->safetensors->find(name);
  return take(name, {stored.type, stored.shape, nullptr}, stored.bytes, stored.offset, {});
}

StoredTensor TensorFile::take(const std::string& name, StoredTensor tensor, int64_t bytes,
                              std::optional<int64_t> offset,
                              const std::function<void(std::span<std::byte>)>& read) const {
  const std::shared_ptr<const MappedFile>& mapping = source_->mapping;
  if (offset && (*offset < 0 || *offset > mapping->bytes() - bytes))
    throw DataError(path_, ": ", quoted_name(name), " ends behind the end of the file (it is truncated)");
  if (offset) {
    tensor.data = {mapping, mapping->data() + *offset};
    tensor.mapped = true;
    return tensor;
  }
  const std::shared_ptr<std::byte> own(new std::byte[static_cast<size_t>(bytes)],
                                       std::default_delete<std::byte[]>());
  read({own.get(), static_cast<size_t>(bytes)});
  tensor.data = own;
  return tensor;
}

}  // namespace tessera::examples

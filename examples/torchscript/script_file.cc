#include "examples/torchscript/script_file.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/ivalue.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <sys/mman.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/operator_upgraders/upgraders_entry.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/import_read.h>
#include <torch/csrc/jit/serialization/import_source.h>
#include <torch/csrc/jit/serialization/storage_context.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>
#include <regex>
#include <string_view>
#include <utility>

#include "checkpoint/formats/zip_directory.h"
#include "core/error.h"
#include "core/files/disk_error.h"
#include "core/files/input_file.h"
#include "core/str.h"
#include "examples/torchscript/script_nesting.h"

namespace tessera::examples {

using caffe2::serialize::PyTorchStreamReader;

/// A file's bytes as memory that may be written, without effect on the file. Null for an empty file.
class PrivateMapping {
 public:
  PrivateMapping(int descriptor, size_t bytes, const std::string& path) : bytes_(bytes) {
    if (bytes == 0) return;
    // The mapping has no reservation, which would count the file as memory that will be written.
    void* const data =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor, 0);
    if (data == MAP_FAILED) throw_disk_error("map", path, errno);
    data_ = static_cast<std::byte*>(data);
  }
  PrivateMapping(const PrivateMapping&) = delete;
  PrivateMapping& operator=(const PrivateMapping&) = delete;
  ~PrivateMapping() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool holds(size_t begin, size_t bytes) const { return begin <= bytes_ && bytes <= bytes_ - begin; }

  /// The pages that lie in the range as a whole are no longer this process's.
  void drop(size_t begin, size_t bytes) const {
    static const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    const size_t first = (begin + page - 1) / page * page, last = (begin + bytes) / page * page;
    if (first < last) ::madvise(data_ + first, last - first, MADV_DONTNEED);
  }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_;
};

namespace {

class MappingAdapter final : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit MappingAdapter(std::shared_ptr<const PrivateMapping> mapping) : mapping_(std::move(mapping)) {}
  size_t size() const override { return mapping_->bytes(); }
  size_t read(uint64_t position, void* buffer, size_t wanted, const char*) const override {
    if (position >= size()) return 0;
    const size_t got = std::min(wanted, size() - position);
    std::memcpy(buffer, mapping_->data() + position, got);
    return got;
  }

 private:
  std::shared_ptr<const PrivateMapping> mapping_;
};

struct Part {
  std::shared_ptr<const PrivateMapping> mapping;
  size_t begin, bytes;
};

c10::DataPtr part_of(const std::shared_ptr<PrivateMapping>& mapping, size_t begin, size_t bytes) {
  const auto drop = [](void* context) {
    const std::unique_ptr<Part> part(static_cast<Part*>(context));
    part->mapping->drop(part->begin, part->bytes);
  };
  return {mapping->data() + begin, new Part{mapping, begin, bytes}, drop, at::kCPU};
}

/// Where a record's bytes begin, if they can be used in place: they are stored as they are, and aligned as
/// libtorch's own allocator aligns.
std::optional<size_t> place_of(PyTorchStreamReader& reader, const PrivateMapping& mapping,
                               const std::string& record, size_t bytes) {
  constexpr std::string_view kSignature = "PK\3\4";  // of the header in front of a record
  constexpr size_t kHeaderBytes = 30, kMethod = 8;   // method: two bytes, 0 is "stored"
  const size_t header = reader.getRecordHeaderOffset(record);
  if (!mapping.holds(header, kHeaderBytes)) return std::nullopt;
  const auto* const text = reinterpret_cast<const char*>(mapping.data() + header);
  if (std::string_view(text, kSignature.size()) != kSignature || text[kMethod] != 0 || text[kMethod + 1] != 0)
    return std::nullopt;
  const size_t begin = reader.getRecordOffset(record);
  if (begin % c10::gAlignment != 0 || !mapping.holds(begin, bytes)) return std::nullopt;
  return begin;
}

c10::Storage storage_of(c10::DataPtr data, size_t bytes) {
  return {c10::Storage::use_byte_size_t(), bytes, std::move(data), /*allocator=*/nullptr,
          /*resizable=*/false};
}

/// Compares every entry with its CRC-32, which libtorch does not do. An archive without them (their writer
/// can be told so) has zeros.
void check_sums(PyTorchStreamReader& reader, const PrivateMapping& mapping, const std::string& path) {
  const checkpoint::ReadBytes read = [&](int64_t offset, int64_t bytes) {
    return std::string(reinterpret_cast<const char*>(mapping.data()) + offset, static_cast<size_t>(bytes));
  };
  const std::vector<checkpoint::ZipEntry> entries =
      checkpoint::read_zip_directory(static_cast<int64_t>(mapping.bytes()), read, path);
  if (std::all_of(entries.begin(), entries.end(), [](const auto& entry) { return entry.crc == 0; })) return;
  at::parallel_for(0, static_cast<int64_t>(entries.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const checkpoint::ZipEntry& entry = entries[static_cast<size_t>(i)];
      if (entry.method != 0) continue;
      checkpoint::check_zip_entry(read, entry, path);
      mapping.drop(static_cast<size_t>(entry.offset), static_cast<size_t>(entry.bytes));
    }
  });
  for (checkpoint::ZipEntry entry : entries) {
    const size_t folder = entry.name.find('/');
    if (entry.method == 0 || folder == std::string::npos) continue;
    const auto [data, bytes] = reader.getRecord(entry.name.substr(folder + 1));  // uncompressed
    entry.offset = 0;
    entry.bytes = static_cast<int64_t>(bytes);
    const char* const content = static_cast<const char*>(data.get());
    checkpoint::check_zip_entry(
        [&](int64_t offset, int64_t count) {
          return std::string(content + offset, static_cast<size_t>(count));
        },
        entry, path);
  }
}

/// Reads what libtorch is about to parse: see script_nesting.h.
void check_nesting(PyTorchStreamReader& reader, const std::vector<std::string>& records,
                   const std::string& path) {
  constexpr size_t kMaxBytes = size_t{1} << 28;  // pickles and code are of kilobytes
  for (const std::string& record : records) {
    const bool is_code = record.starts_with("code/") && record.ends_with(".py");
    if (!is_code && record != "data.pkl" && record != "constants.pkl") continue;
    const std::string name = str(path, ": ", record);
    if (const size_t bytes = reader.getRecordSize(record); bytes > kMaxBytes)
      throw DataError(name, ": found ", bytes, " bytes; expected at most ", kMaxBytes);
    const auto [data, bytes] = reader.getRecord(record);
    const std::string_view text(static_cast<const char*>(data.get()), bytes);
    is_code ? check_code(text, name) : check_pickle(text, name);
  }
}

[[noreturn]] void fail_for_bytes(const std::string& path, const std::string& shape,
                                 const std::string& bytes) {
  throw DataError(path, ": a tensor of shape ", shape, " has a record of ", bytes,
                  " bytes; the file is damaged");
}

/// What torch 2.15 says of a tensor that exceeds its record, which it looks at itself.
std::optional<std::pair<std::string, std::string>> shape_and_bytes(const std::string& message) {
  static const std::regex too_small("Tensor: sizes ([0-9 ]*), .* storage only has ([0-9]+) bytes");
  std::smatch found;
  if (!std::regex_search(message, found, too_small)) return std::nullopt;
  return std::pair(str("[", std::regex_replace(found.str(1), std::regex(" "), ", "), "]"), found.str(2));
}

/// The unpickler of torch before 2.15 does not compare a tensor's shape with its record, which may be
/// damaged.
void check_tensors(const c10::IValue& root, const std::string& path) {
  root.visit([&](const c10::IValue& value) {
    if (!value.isTensor()) return false;
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_meta()) return false;
    const auto negative = [](int64_t number) { return number < 0; };
    const bool wrong = std::any_of(tensor.sizes().begin(), tensor.sizes().end(), negative) ||
                       std::any_of(tensor.strides().begin(), tensor.strides().end(), negative) ||
                       negative(tensor.storage_offset());
    if (wrong || at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                  static_cast<size_t>(tensor.storage_offset())) >
                     tensor.storage().nbytes())
      fail_for_bytes(path, describe_shape(tensor.sizes()), str(tensor.storage().nbytes()));
    return false;
  });
}

}  // namespace

ScriptFile::ScriptFile(std::string path) : path_(std::move(path)), descriptor_(open_input(path_)) {
  if (::fstat(descriptor_.get(), &opened_) != 0) throw_disk_error("read", path_, errno);
  mapping_ = std::make_shared<PrivateMapping>(descriptor_.get(), static_cast<size_t>(opened_.st_size), path_);
}

ScriptFile::~ScriptFile() = default;

std::shared_ptr<torch::jit::Module> ScriptFile::load() {
  torch::jit::populate_upgraders_graph_map();
  PyTorchStreamReader reader(std::make_shared<MappingAdapter>(mapping_));
  check_sums(reader, *mapping_, path_);
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  std::vector<c10::IValue> constants;
  const torch::jit::SourceImporter importer(
      unit, &constants,
      [&](const std::string& qualifier) -> std::shared_ptr<torch::jit::Source> {
        std::string name = str("code/", qualifier, ".py");
        std::replace(name.begin(), name.begin() + static_cast<ptrdiff_t>(5 + qualifier.size()), '.', '/');
        if (!reader.hasRecord(name)) return nullptr;
        const auto [text, bytes] = reader.getRecord(name);
        return std::make_shared<torch::jit::Source>(
            std::string_view(static_cast<const char*>(text.get()), bytes), name, /*starting_line_no=*/1);
      },
      reader.version());

  const std::vector<std::string> records = reader.getAllRecords();
  check_nesting(reader, records, path_);
  const auto read_archive = [&](const std::string& name) {
    const std::string folder = name + "/";
    const auto storages = std::make_shared<torch::jit::DeserializationStorageContext>();
    for (const std::string& record : records) {
      const size_t bytes = record.starts_with(folder) ? reader.getRecordSize(record) : 0;
      if (bytes == 0) continue;
      const std::optional<size_t> begin = place_of(reader, *mapping_, record, bytes);
      c10::Storage storage =
          storage_of(begin ? part_of(mapping_, *begin, bytes) : std::get<0>(reader.getRecord(record)), bytes);
      if (begin) in_mapping_.emplace_back(storage.getWeakStorageImpl());
      storages->addStorage(record.substr(folder.size()), std::move(storage));
    }
    const auto resolve = [&](const c10::QualifiedName& type) {
      return c10::StrongTypePtr(unit, importer.loadType(type));
    };
    try {
      const c10::IValue value = torch::jit::readArchiveAndTensors(
          name, /*pickle_prefix=*/"", /*tensor_prefix=*/"", resolve, torch::jit::ObjLoaderFunc,
          at::Device(at::kCPU), reader, torch::jit::Unpickler::defaultTypeParser, storages);
      check_tensors(value, path_);
      return value;
    } catch (const c10::Error& error) {
      if (const auto found = shape_and_bytes(error.what_without_backtrace()))
        fail_for_bytes(path_, found->first, found->second);
      throw;
    }
  };
  const auto table = read_archive("constants").toTuple();
  for (const c10::IValue& constant : table->elements()) constants.push_back(constant);
  return std::make_shared<torch::jit::Module>(read_archive("data").toObject());
}

void ScriptFile::detach() {
  for (const auto& weak : in_mapping_) {
    const auto storage = weak.lock();
    if (!storage) continue;
    c10::DataPtr own = c10::GetCPUAllocator()->allocate(storage->nbytes());
    std::memcpy(own.mutable_get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(own));
  }
  in_mapping_.clear();
  mapping_.reset();
  struct stat now{};
  const FileDescriptor descriptor = std::move(descriptor_);
  if (::fstat(descriptor.get(), &now) != 0) throw_disk_error("read", path_, errno);
  if (now.st_size != opened_.st_size || now.st_mtim.tv_sec != opened_.st_mtim.tv_sec ||
      now.st_mtim.tv_nsec != opened_.st_mtim.tv_nsec)
    throw DataError(path_,
                    ": was written to while the model was made of it; start again, and put a new "
                    "file there by renaming it");
}

int64_t ScriptFile::mapped_bytes() const {
  int64_t bytes = 0;
  for (const auto& weak : in_mapping_)
    if (const auto storage = weak.lock()) bytes += static_cast<int64_t>(storage->nbytes());
  return bytes;
}

}  // namespace tessera::examples

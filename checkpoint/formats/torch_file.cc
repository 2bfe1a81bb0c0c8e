#include "checkpoint/formats/torch_file.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <string_view>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/zip_directory.h"
#include "core/files/input_file.h"
#include "core/parse_number.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::checkpoint {

using Kind = PickleValue::Kind;

namespace {

using std::string_view;

constexpr string_view kMagicNumber = "119547037146038801333356";  // 0x1950a86a20f9469cfc6c
constexpr int64_t kLegacyVersion = 1001;
constexpr size_t kMaxTensorDimensions = 64;  // libtorch's limit
constexpr int kMaxWrappers = 8;              // of a tensor: a Parameter of a subclass of …
constexpr int64_t kStartBytes = 262;         // that tell the formats apart: a tar archive has its name last
constexpr int64_t kFirstPickleBytes = int64_t{1} << 20, kMostPickleBytes = int64_t{1} << 30;
constexpr int64_t kMaxVersion = 10;  // of the archive, that torch reads

/// Classes of storages by name, without "Storage".
constexpr std::array<std::pair<string_view, DType>, 15> kStorages = {{{"Float", DType::kFloat32},
                                                                      {"BFloat16", DType::kBFloat16},
                                                                      {"Half", DType::kFloat16},
                                                                      {"Double", DType::kFloat64},
                                                                      {"Long", DType::kInt64},
                                                                      {"Int", DType::kInt32},
                                                                      {"Short", DType::kInt16},
                                                                      {"Char", DType::kInt8},
                                                                      {"Byte", DType::kUInt8},
                                                                      {"Bool", DType::kBool},
                                                                      {"ComplexHalf", DType::kComplex32},
                                                                      {"ComplexFloat", DType::kComplex64},
                                                                      {"ComplexDouble", DType::kComplex128},
                                                                      {"Untyped", DType::kUInt8},
                                                                      {"_Untyped", DType::kUInt8}}};

struct Builder {
  string_view name;
  const char* not_read;  ///< what its tensors are; null: they are read
};
constexpr Builder kBuilders[] = {
    {"torch._utils._rebuild_tensor", nullptr},
    {"torch._utils._rebuild_tensor_v2", nullptr},
    {"torch._utils._rebuild_tensor_v3", nullptr},
    {"torch._utils._rebuild_parameter", nullptr},
    {"torch._utils._rebuild_parameter_with_state", nullptr},
    {"torch._tensor._rebuild_from_type", nullptr},
    {"torch._tensor._rebuild_from_type_v2", nullptr},
    {"torch.tensor._rebuild_from_type", nullptr},
    {"torch._utils._rebuild_sparse_tensor", "a sparse tensor"},
    {"torch._utils._rebuild_sparse_csr_tensor", "a sparse tensor"},
    {"torch._utils._rebuild_qtensor", "a quantized tensor"},
    {"torch._utils._rebuild_nested_tensor", "a nested tensor"},
    {"torch._utils._rebuild_meta_tensor_no_storage", "a tensor on \"meta\", which has no elements"},
    {"torch._utils._rebuild_wrapper_subclass", "a tensor that wraps others"},
    {"torch._utils._rebuild_device_tensor_from_cpu_tensor", "a tensor of another device"},
    {"torch._utils._rebuild_device_tensor_from_numpy", "a tensor of another device"},
    {"torch._utils._rebuild_xla_tensor", "a tensor of another device"},
};

const Builder* builder_of(string_view name) {
  const auto* found = std::find_if(std::begin(kBuilders), std::end(kBuilders),
                                   [&](const Builder& b) { return b.name == name; });
  return found == std::end(kBuilders) ? nullptr : found;
}

bool is_text(const PickleValue& value, string_view word) {
  return (value.kind == Kind::kString || value.kind == Kind::kBytes) && value.text == word;
}

/// A file that is cut while it is read is an error; a mapping would end the process.
std::string read_text(const InputFile& file, int64_t offset, int64_t bytes) {
  std::string text(static_cast<size_t>(bytes), '\0');
  file.read_at(offset, std::as_writable_bytes(std::span(text)));
  return text;
}

/// Whether the file begins with the first pickle of the legacy format.
bool has_magic_number(std::string_view start) {
  if (!start.starts_with('\x80')) return false;
  try {
    const Pickle magic(std::as_bytes(std::span(start)), "");
    return magic.root().kind == Kind::kLong && magic.root().text == kMagicNumber;
  } catch (const CheckpointError&) {
    return false;
  }
}

}  // namespace

std::optional<DType> torch_dtype(string_view global) {
  if (!global.starts_with("torch.")) return std::nullopt;
  const string_view name = global.substr(6);
  for (const auto& [ours, torchs] : {std::pair<string_view, string_view>{"fp32", "float32"},
                                     {"bf16", "bfloat16"},
                                     {"fp16", "float16"},
                                     {"fp64", "float64"}}) {
    if (name == torchs) return dtype_named(ours);
    if (name == ours) return std::nullopt;
  }
  return dtype_named(name);
}

int64_t TorchTensor::numel() const {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;  // the others may be large
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

bool TorchTensor::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t step = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    if (shape[d] != 1 && strides[d] != step) return false;
    step *= shape[d];
  }
  return true;
}

/// What a persistent id says about a storage.
struct TorchFile::StorageId {
  std::string key;
  DType type = DType::kUInt8;
  int64_t numel = 0;        ///< of the whole storage
  int64_t view_offset = 0;  ///< elements before the part that is meant
  int64_t view_numel = 0;
  bool is_meta = false;
};

TorchFile::TorchFile(const std::filesystem::path& path, int64_t begin, int64_t bytes)
    : input_(path), begin_(begin) {
  if (begin < 0 || begin > input_.bytes() || bytes > input_.bytes() - begin)
    fail("ends at byte ", input_.bytes(), "; expected ", bytes, " bytes from byte ", begin, " on");
  part_bytes_ = bytes < 0 ? input_.bytes() - begin : bytes;
  const std::string start = read_part(0, std::min(part_bytes_, kStartBytes));
  if (start.starts_with("PK\3\4")) {
    read_archive();
  } else if (has_magic_number(start)) {
    read_legacy();
  } else {
    fail_start(start);
  }
}

std::string TorchFile::read(int64_t offset, int64_t bytes) const { return read_text(input_, offset, bytes); }

void TorchFile::fail_start(const std::string& start) const {
  if (start.size() > 257 && start.substr(257).starts_with("ustar"))
    fail(
        "is a tar archive, the format of torch.save before torch 0.1.12, which is not read; load it with "
        "a torch that reads it, and save it again");
  if (start.starts_with("version ")) fail("is a Git LFS pointer: git lfs pull brings the file itself");
  if (start.starts_with(str("L", kMagicNumber, "L")))
    fail("is of pickle protocol 0 or 1, which is not read: load it in Python, and save it with torch.save");
  if (start.starts_with('\x80')) fail("is a pickle, but torch.save did not write it");
  fail("is no file of torch.save: it is neither a zip archive nor begins with torch's magic number");
}

void TorchFile::read_archive() {
  entries_ = read_zip_directory(part_bytes_, reader(), path().string());
  const ZipEntry* data = nullptr;
  for (const ZipEntry& entry : entries_) {
    const size_t slash = entry.name.find('/');
    if (slash == std::string::npos || entry.name.substr(slash) != "/data.pkl") continue;
    if (data != nullptr)
      fail("the archive has ", quoted_name(data->name), " and ", quoted_name(entry.name), "; expected one");
    data = &entry;
    archive_ = entry.name.substr(0, slash + 1);
  }
  if (data == nullptr) fail("is a zip archive without a data.pkl: torch.save did not write it");
  for (const ZipEntry& entry : entries_)
    if (entry.name == archive_ + "constants.pkl" || entry.name.starts_with(archive_ + "code/"))
      fail("is a TorchScript program, with ", quoted_name(entry.name), "; expected what torch.save writes");
  for (const ZipEntry& entry : entries_) {
    if (!entry.name.starts_with(archive_))
      fail("entry ", quoted_name(entry.name), " of the archive is outside of ", archive_,
           ", where torch.save writes");
    const string_view name = string_view(entry.name).substr(archive_.size());
    if (entry.method != 0)
      fail("entry ", quoted_name(entry.name), " of the archive is compressed (method ", entry.method,
           "); expected stored entries, as torch.save writes them");
    has_checksums_ = has_checksums_ || entry.crc != 0;
    if (name.starts_with("data/")) storages_[std::string(name.substr(5))] = {entry.offset, entry.bytes};
  }
  const std::string byte_order = small_entry("byteorder");
  if (!byte_order.empty() && byte_order != "little")
    fail("its numbers are in the byte order ", quoted_name(byte_order), "; expected little");
  std::string version = small_entry("version");
  if (version.empty()) version = small_entry(".data/version");
  std::string_view digits = version;  // and a line break
  const int64_t number = take_number<int64_t>(digits).value_or(0);
  if (number < 1 || number > kMaxVersion)
    fail("the archive's version is ", quoted_name(version), "; expected 1 to ", kMaxVersion);
  if (has_checksums_) check_zip_entry(reader(), *data, path().string());
  pickle_ = read_pickle(data->offset, data->bytes);
  if (pickle_->bytes() != data->bytes)
    fail("the pickle ends at byte ", pickle_->bytes(), " of ", data->bytes,
         " of data.pkl; expected at the last");
}

/// How long a pickle is shows when it has been read: what is given to it grows until it ends within. So what
/// a file says of lengths costs no memory.
std::unique_ptr<Pickle> TorchFile::read_pickle(int64_t offset, int64_t bytes) const {
  const int64_t most = std::min(bytes, kMostPickleBytes);
  for (int64_t given = kFirstPickleBytes;; given *= 4) {
    const std::string text = read_part(offset, std::min(given, most));
    try {
      return std::make_unique<Pickle>(std::as_bytes(std::span(text)), path().string());
    } catch (const PickleEndsEarly&) {
      if (given >= most) throw;
    }
  }
}

std::string TorchFile::small_entry(const std::string& name) const {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const ZipEntry& entry) { return entry.name == archive_ + name; });
  if (found == entries_.end()) return "";
  if (found->bytes > 100)
    fail("entry ", quoted_name(found->name), " has ", found->bytes, " bytes; expected a word");
  if (has_checksums_) check_zip_entry(reader(), *found, path().string());
  return read_part(found->offset, found->bytes);
}

// The file is one pickle after the other, and then the storages' elements: the magic number, the version,
// what the machine was like, the object, the keys of the storages.
void TorchFile::read_legacy() {
  int64_t position = 0;
  const auto next = [&] {
    auto one = read_pickle(position, part_bytes_ - position);
    position += one->bytes();
    return one;
  };
  next();
  const auto version = next();
  if (version->root().kind != Kind::kInt || version->root().integer != kLegacyVersion)
    fail("the version of the format is ", version->root().describe(), "; expected ", kLegacyVersion);
  const auto machine = next();
  const PickleValue* little = machine->root().find("little_endian");
  if (little == nullptr || little->kind != Kind::kBool || little->integer != 1)
    fail("\"little_endian\" is ", little == nullptr ? "missing" : little->describe(), "; expected True");
  pickle_ = next();
  const auto keys = next();
  place_legacy_storages(keys->root(), position);
}

void TorchFile::place_legacy_storages(const PickleValue& keys, int64_t position) {
  if (keys.kind != Kind::kList) fail("the keys of the storages are ", keys.describe(), "; expected a list");
  std::map<std::string, StorageId> ids;
  for (const PickleValue* value : pickle_->persistent()) {
    StorageId id = storage_id(*value);
    const std::string key = id.key;
    ids.try_emplace(key, std::move(id));
  }
  for (const PickleValue* value : keys.items) {
    const std::string key =
        value->kind == Kind::kInt ? std::to_string(value->integer) : std::string(value->text);
    const auto id = ids.find(key);
    if (id == ids.end()) fail("storage ", quoted_name(key), " is in the file, and no tensor has it");
    const int64_t left = part_bytes_ - position, element = size_bytes(id->second.type);
    if (left < 8) fail("the file ends early, before storage ", quoted_name(key));
    int64_t numel = 0;
    std::memcpy(&numel, read_part(position, 8).data(), 8);  // little-endian
    if (numel != id->second.numel)
      fail("storage ", quoted_name(key), " has ", numel, " elements; expected ", id->second.numel);
    if (numel > (left - 8) / element)
      fail("storage ", quoted_name(key), " of ", numel, " elements lies outside of the file, which has ",
           left - 8, " bytes left");
    if (!storages_.try_emplace(key, Place{position + 8, numel * element}).second)
      fail("storage ", quoted_name(key), " is in the file twice");
    position += 8 + numel * element;
  }
  if (position != part_bytes_)
    fail("the last storage ends at byte ", position, "; expected at the file's end, byte ", part_bytes_);
}

int64_t TorchFile::integer(const PickleValue& value, const char* what) const {
  if (value.kind != Kind::kInt || value.integer < 0)
    fail("a tensor's ", what, " is ", value.describe(), "; expected an integer of 0 or more");
  return value.integer;
}

std::vector<int64_t> TorchFile::integers(const PickleValue& value, const char* what) const {
  if ((value.kind != Kind::kTuple && value.kind != Kind::kList) || value.items.size() > kMaxTensorDimensions)
    fail("a tensor's ", what, " is ", value.describe(), "; expected a tuple of at most ",
         kMaxTensorDimensions);
  std::vector<int64_t> numbers;
  for (const PickleValue* item : value.items) numbers.push_back(integer(*item, what));
  return numbers;
}

// ("storage", CLASS, KEY, LOCATION, NUMEL), in the legacy format with a view: None or (KEY, OFFSET, NUMEL).
TorchFile::StorageId TorchFile::storage_id(const PickleValue& value) const {
  const PickleValue* id = value.kind == Kind::kPersistent ? value.arguments : nullptr;
  if (id == nullptr || id->kind != Kind::kTuple || (id->items.size() != 5 && id->items.size() != 6) ||
      !is_text(*id->items[0], "storage"))
    fail("a storage is ", id == nullptr ? value.describe() : id->describe(),
         "; expected a tuple of \"storage\" and its type, key, location and size");
  const PickleValue &type = *id->items[1], &key = *id->items[2], &location = *id->items[3];
  StorageId storage;
  string_view name = type.kind == Kind::kGlobal ? type.text : string_view();
  const bool is_torchs = name.starts_with("torch.") && name.ends_with("Storage");
  if (is_torchs) name = name.substr(name.rfind('.') + 1, name.size() - name.rfind('.') - 8);
  const auto known = std::find_if(kStorages.begin(), kStorages.end(),
                                  [&](const auto& entry) { return is_torchs && entry.first == name; });
  if (known == kStorages.end()) fail("the type of a storage is ", type.describe(), ", which is not read");
  storage.type = known->second;
  if (key.kind != Kind::kString && key.kind != Kind::kInt)
    fail("the key of a storage is ", key.describe(), "; expected a text");
  storage.key = key.kind == Kind::kInt ? std::to_string(key.integer) : std::string(key.text);
  storage.is_meta = is_text(location, "meta");
  storage.numel = integer(*id->items[4], "storage's size");
  storage.view_numel = storage.numel;
  if (id->items.size() == 5 || id->items[5]->kind == Kind::kNone) return storage;
  const PickleValue& view = *id->items[5];
  if (view.kind != Kind::kTuple || view.items.size() != 3)
    fail("the view of a storage is ", view.describe(), "; expected a tuple of its key, offset and size");
  storage.view_offset = integer(*view.items[1], "storage's offset");
  storage.view_numel = integer(*view.items[2], "storage's size");
  if (storage.view_offset > storage.numel || storage.view_numel > storage.numel - storage.view_offset)
    fail("storage ", quoted_name(storage.key), " of ", storage.numel, " elements has a view of ",
         storage.view_numel, " from element ", storage.view_offset, " on");
  return storage;
}

// (storage, offset, size, stride), v2: and requires_grad, hooks, metadata; v3: and requires_grad, hooks,
// type, metadata.
TorchTensor TorchFile::built(string_view builder, const std::vector<const PickleValue*>& arguments) const {
  const bool is_v1 = builder.ends_with("_tensor"), is_v3 = builder.ends_with("_v3");
  const size_t least = is_v1 ? 4 : is_v3 ? 7 : 6, metadata = is_v3 ? 7 : 6;
  if (arguments.size() < least || arguments.size() > (is_v1 ? least : least + 1))
    fail(builder, " has ", arguments.size(), " arguments; expected ", least);
  const StorageId id = storage_id(*arguments[0]);
  if (id.is_meta) fail("a tensor is on \"meta\", which has no elements; it is not read");
  TorchTensor tensor;
  tensor.storage = id.key;
  tensor.type = id.type;
  if (is_v3) {
    const auto type = torch_dtype(arguments[6]->global());
    if (!type) fail("a tensor's type is ", arguments[6]->describe(), ", which is not read");
    tensor.type = *type;
  }
  const int64_t offset = integer(*arguments[1], "offset");
  tensor.shape = integers(*arguments[2], "size");
  tensor.strides = integers(*arguments[3], "stride");
  if (tensor.shape.size() != tensor.strides.size())
    fail("a tensor has ", tensor.shape.size(), " sizes and ", tensor.strides.size(), " strides");
  if (!is_v1) tensor.requires_grad = arguments[4]->kind == Kind::kBool && arguments[4]->integer != 0;
  if (arguments.size() > metadata && !arguments[metadata]->items.empty())
    for (const char* bit : {"conj", "neg"})
      if (const PickleValue* set = arguments[metadata]->find(bit); set != nullptr && set->integer != 0)
        fail("a tensor of size ", describe_shape(tensor.shape), " has its \"", bit,
             "\" bit set: its elements are not those of the file; expected a tensor after resolve_", bit,
             "()");

  const auto place = storages_.find(id.key);
  if (place == storages_.end()) fail("storage ", quoted_name(id.key), " of a tensor is not in the file");
  const int64_t element = size_bytes(id.type);
  if (id.numel > INT64_MAX / element || id.numel * element > place->second.bytes ||
      place->second.bytes - id.numel * element >= element)
    fail("storage ", quoted_name(id.key), " is of ", id.numel, " elements of ", element,
         " bytes, and the file has ", place->second.bytes, " bytes of it");
  const int64_t view_begin = id.view_offset * element;
  check_within(tensor, offset, id.view_numel * element / size_bytes(tensor.type));
  tensor.offset = begin_ + place->second.offset + view_begin +
                  (tensor.numel() == 0 ? 0 : offset * size_bytes(tensor.type));
  return tensor;
}

/// Checks that the elements are among the `available` ones of the storage.
void TorchFile::check_within(const TorchTensor& tensor, int64_t offset, int64_t available) const {
  using Wide =
      __int128;  // of numbers that are within 2^63, sums of products do not overflow before they are compared
  Wide numel = 1, last = offset;
  const bool is_empty = std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end();
  for (size_t d = 0; d < tensor.shape.size() && !is_empty; ++d) {
    numel *= tensor.shape[d];
    last += static_cast<Wide>(tensor.shape[d] - 1) * tensor.strides[d];
    if (numel * size_bytes(tensor.type) > INT64_MAX || last > INT64_MAX) break;
  }
  if (is_empty) return;
  if (numel * size_bytes(tensor.type) > INT64_MAX)
    fail("a tensor of size ", describe_shape(tensor.shape), " has more than 2^63 bytes");
  if (last >= available)
    fail("a tensor of size ", describe_shape(tensor.shape), " and stride ", describe_shape(tensor.strides),
         " from element ", offset, " on lies outside of storage ", quoted_name(tensor.storage),
         ", which has ", available, " elements");
}

bool TorchFile::recognizes(const std::filesystem::path& path) {
  try {
    const InputFile file(path);
    const ReadBytes read = [&](int64_t offset, int64_t bytes) { return read_text(file, offset, bytes); };
    const std::string start = read(0, std::min(file.bytes(), kStartBytes));
    if (has_magic_number(start)) return true;
    if (!start.starts_with("PK\3\4")) return false;
    const auto entries = read_zip_directory(file.bytes(), read, path.string());
    return std::any_of(entries.begin(), entries.end(),
                       [](const ZipEntry& entry) { return entry.name.ends_with("/data.pkl"); });
  } catch (const Error&) {
    return false;
  }
}

const char* TorchFile::unread_tensor(const PickleValue& value) {
  const PickleValue* inner = &value;
  for (int wrappers = 0; wrappers < kMaxWrappers && inner->kind == Kind::kObject; ++wrappers) {
    const Builder* builder = builder_of(inner->global());
    if (builder == nullptr) return nullptr;
    if (builder->not_read != nullptr) return builder->not_read;
    const std::vector<const PickleValue*>& given = inner->arguments->items;
    const bool from_type = builder->name.find("_rebuild_from_type") != string_view::npos;
    if (from_type && !given.empty())  // (function, class, arguments, state)
      if (const Builder* called = builder_of(given[0]->global());
          called != nullptr && called->not_read != nullptr)
        return called->not_read;
    if (from_type || given.empty()) return nullptr;
    inner = given[0];  // of a parameter
  }
  return nullptr;
}

std::optional<TorchTensor> TorchFile::tensor(const PickleValue& value) const {
  if (value.kind != Kind::kObject) return std::nullopt;
  string_view name = value.global();
  if (builder_of(name) == nullptr) {
    if (name.starts_with("torch.") && name.ends_with("Tensor") && name.find('.', 6) == string_view::npos)
      fail("a tensor is a ", name, " as torch wrote before 0.1.12, which is not read");
    return std::nullopt;
  }
  bool is_parameter = false;
  std::optional<bool> requires_grad;
  const PickleValue* arguments = value.arguments;
  for (int wrappers = 0; wrappers < kMaxWrappers; ++wrappers) {
    const Builder* builder = builder_of(name);
    if (builder == nullptr) fail("a tensor is made by ", name, ", which is not read");
    if (builder->not_read != nullptr) fail("has ", builder->not_read, " (", name, "), which is not read");
    const std::vector<const PickleValue*>& given = arguments->items;
    if (name.find("_rebuild_from_type") != string_view::npos) {  // (function, class, arguments, state)
      if (given.size() != 4 || given[2]->kind != Kind::kTuple)
        fail(name, " has ", given.size() == 4 ? given[2]->describe() : arguments->describe(),
             " as arguments; expected a tuple");
      is_parameter = is_parameter || given[1]->global().ends_with(".Parameter");
      name = given[0]->global();
      arguments = given[2];
    } else if (name.find("_rebuild_parameter") != string_view::npos) {  // (tensor, requires_grad, hooks, …)
      if (given.size() < 2 || given[0]->kind != Kind::kObject)
        fail("a parameter is of ", given.empty() ? "nothing" : given[0]->describe(), "; expected a tensor");
      is_parameter = true;
      if (!requires_grad) requires_grad = given[1]->kind == Kind::kBool && given[1]->integer != 0;
      name = given[0]->global();
      arguments = given[0]->arguments;
    } else {
      TorchTensor tensor = built(name, given);
      tensor.is_parameter = is_parameter;
      if (requires_grad) tensor.requires_grad = *requires_grad;
      return tensor;
    }
  }
  fail("a tensor is in more than ", kMaxWrappers, " others");
}

bool TorchFile::verify() const {
  if (!has_checksums_) return false;
  for (const ZipEntry& entry : entries_) check_zip_entry(reader(), entry, path().string());
  return true;
}

}  // namespace tessera::checkpoint

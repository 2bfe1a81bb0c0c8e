#include "checkpoint/formats/torch_writer.h"

#include <zlib.h>
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>

#include "checkpoint/formats/torch_zip.h"
#include "core/files/pending_file.h"

namespace tessera::checkpoint {
namespace {

/// Null: torch has no class for the type, and writes bytes and the type's name.
const char* storage_class(DType type) {
  switch (type) {
    case DType::kFloat64: return "DoubleStorage";
    case DType::kFloat32: return "FloatStorage";
    case DType::kBFloat16: return "BFloat16Storage";
    case DType::kFloat16: return "HalfStorage";
    case DType::kInt64: return "LongStorage";
    case DType::kInt32: return "IntStorage";
    case DType::kInt16: return "ShortStorage";
    case DType::kInt8: return "CharStorage";
    case DType::kUInt8: return "ByteStorage";
    case DType::kBool: return "BoolStorage";
    case DType::kComplex64: return "ComplexFloatStorage";
    case DType::kComplex128: return "ComplexDoubleStorage";
    default: return nullptr;
  }
}

// Opcodes of Python's pickle.py. Nothing is memoized: a reader needs no memo,
// and a state_dict's pickle is small.
class PickleWriter {
 public:
  PickleWriter& op(std::string_view opcode) {
    bytes_ += opcode;
    return *this;
  }
  PickleWriter& proto() { return op("\x80\x02"); }
  PickleWriter& global(std::string_view module, std::string_view name) {
    return op("c").op(module).op("\n").op(name).op("\n");
  }
  PickleWriter& text(std::string_view value) {
    return op("X").little_endian(value.size(), 4).op(value);
  }  // BINUNICODE
  PickleWriter& number(int64_t value) {
    if (value <= 0xff) return op("K").little_endian(static_cast<uint64_t>(value), 1);    // BININT1
    if (value <= 0xffff) return op("M").little_endian(static_cast<uint64_t>(value), 2);  // BININT2
    if (value <= std::numeric_limits<int32_t>::max())
      return op("J").little_endian(static_cast<uint64_t>(value), 4);       // BININT
    return op("\x8a\x08").little_endian(static_cast<uint64_t>(value), 8);  // LONG1
  }
  PickleWriter& tuple(const std::vector<int64_t>& values) {
    if (values.empty()) return op(")");  // EMPTY_TUPLE
    op("(");                             // MARK
    for (const int64_t value : values) number(value);
    return op("t");  // TUPLE
  }
  PickleWriter& ordered_dict() {
    return global("collections", "OrderedDict").op(")R");
  }  // EMPTY_TUPLE REDUCE

  std::string take() { return std::move(bytes_); }

 private:
  PickleWriter& little_endian(uint64_t value, int num_bytes) {
    for (int i = 0; i < num_bytes; ++i) bytes_ += static_cast<char>(value >> (8 * i) & 0xff);
    return *this;
  }
  std::string bytes_;
};

// Returns the strides as torch counts them: a size of zero counts as one.
std::vector<int64_t> strides_of(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    if (__builtin_mul_overflow(stride, std::max<int64_t>(shape[i], 1), &stride))
      stride = 1;  // only where a size is zero
  }
  return strides;
}

// torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, backward_hooks), or
// torch._utils._rebuild_tensor_v3(…, dtype) of a storage of bytes.
void rebuild_tensor(PickleWriter& pickle, const ModelTensor& tensor, size_t index) {
  const char* const storage = storage_class(tensor.type);
  pickle.global("torch._utils", storage != nullptr ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3").op("(");
  pickle.op("(").text("storage");
  storage != nullptr ? pickle.global("torch", storage) : pickle.global("torch.storage", "UntypedStorage");
  pickle.text(std::to_string(index)).text("cpu");
  pickle.number(storage != nullptr ? tensor.bytes() / size_bytes(tensor.type) : tensor.bytes());
  pickle.op("tQ");  // TUPLE BINPERSID
  pickle.number(0).tuple(tensor.shape).tuple(strides_of(tensor.shape));
  pickle.op("\x89").ordered_dict();  // NEWFALSE
  if (storage == nullptr) pickle.global("torch", name_of(tensor.type));
  pickle.op("tR");  // TUPLE REDUCE
}

}  // namespace

std::string state_dict_pickle(const std::vector<ModelTensor>& tensors) {
  PickleWriter pickle;
  pickle.proto().ordered_dict().op("(");
  for (size_t i = 0; i < tensors.size(); ++i) {
    pickle.text(tensors[i].name);
    rebuild_tensor(pickle, tensors[i], i);
    for (const std::string& alias : tensors[i].aliases) {
      pickle.text(alias);
      rebuild_tensor(pickle, tensors[i], i);
    }
  }
  pickle.op("u.");  // SETITEMS STOP
  return pickle.take();
}

namespace {

uint32_t crc_of(uint32_t crc, std::span<const std::byte> data) {
  return static_cast<uint32_t>(crc32_z(crc, reinterpret_cast<const Bytef*>(data.data()), data.size()));
}

class TorchFileWriter : public ModelWriter {
 public:
  TorchFileWriter(const Disk& disk, ModelWriterOptions options)
      : ModelWriter(std::move(options.tensors)), zip_("archive"), file_(disk, options.path) {
    texts_ = {{"data.pkl", state_dict_pickle(tensors())},
              {".format_version", "1"},
              {".storage_alignment", "64"},
              {"byteorder", "little"}};
    for (const auto& [name, text] : texts_) zip_.add(name, static_cast<int64_t>(text.size()));
    for (size_t i = 0; i < tensors().size(); ++i) zip_.add("data/" + std::to_string(i), tensors()[i].bytes());
    zip_.add("version", static_cast<int64_t>(kVersion.size()));
    crcs_.assign(zip_.entries().size(), 0);
    file_.file().reserve(zip_.file_bytes());
  }

 private:
  static constexpr std::string_view kVersion = "3\n";

  void write(size_t index, int64_t offset, std::span<const std::byte> data) override {
    const size_t entry = texts_.size() + index;
    file_.file().write_at(zip_.entries()[entry].data_offset + offset, data);
    crcs_[entry] = crc_of(crcs_[entry], data);
  }

  void write_text(size_t entry, std::string_view text) {
    const auto data = std::as_bytes(std::span(text));
    file_.file().write_at(zip_.entries()[entry].data_offset, data);
    crcs_[entry] = crc_of(0, data);
  }

  void publish() override {
    for (size_t i = 0; i < texts_.size(); ++i) write_text(i, texts_[i].second);
    write_text(zip_.entries().size() - 1, kVersion);
    for (size_t i = 0; i < zip_.entries().size(); ++i) {
      const std::string between = zip_.between(i, i == 0 ? 0 : crcs_[i - 1]);
      file_.file().write_at(i == 0 ? 0 : zip_.data_end(i - 1), std::as_bytes(std::span(between)));
    }
    const std::string tail = zip_.tail(crcs_);
    file_.file().write_at(zip_.data_end(zip_.entries().size() - 1), std::as_bytes(std::span(tail)));
    file_.publish();
  }

  std::vector<std::pair<std::string, std::string>> texts_;  // the entries before the data
  TorchZip zip_;
  std::vector<uint32_t> crcs_;  // by entry
  PendingFile file_;
};

}  // namespace

std::unique_ptr<ModelWriter> open_torch_file(const Disk& disk, ModelWriterOptions options) {
  return std::make_unique<TorchFileWriter>(disk, std::move(options));
}

}  // namespace tessera::checkpoint

#include "checkpoint/formats/model_writer.h"

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/pickle_writer.h"
#include "checkpoint/formats/safetensors.h"
#include "checkpoint/formats/safetensors_writer.h"
#include "checkpoint/formats/torch_archive.h"
#include "checkpoint/hdf5/hdf5_image.h"
#include "core/check.h"
#include "core/files/pending_file.h"
#include "core/numel.h"
#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

std::string state_dict_pickle(const std::vector<ModelTensor>& tensors) {
  PickleWriter pickle;
  pickle.begin_ordered_dict();
  for (size_t i = 0; i < tensors.size(); ++i) {
    pickle.text(tensors[i].name).tensor(tensors[i].type, tensors[i].shape, i);
    for (const std::string& alias : tensors[i].aliases)
      pickle.text(alias).tensor(tensors[i].type, tensors[i].shape, i);
  }
  return pickle.end_dict().finish();
}

std::vector<int64_t> sizes_of(const std::vector<ModelTensor>& tensors) {
  std::vector<int64_t> sizes;
  for (const ModelTensor& tensor : tensors) sizes.push_back(tensor.bytes());
  return sizes;
}

/// What torch.save writes for a state_dict: torch.load reads it with weights_only=True and mmap=True.
class TorchFileWriter : public ModelWriter {
 public:
  TorchFileWriter(const Disk& disk, ModelWriterOptions options)
      : ModelWriter(std::move(options.tensors)),
        archive_(state_dict_pickle(tensors()), sizes_of(tensors())),
        file_(disk, options.path) {
    file_.file().reserve(archive_.bytes());
  }

 private:
  void write(size_t index, int64_t offset, std::span<const std::byte> data) override {
    archive_.write(file_.file(), 0, index, offset, data);
  }

  void publish() override {
    archive_.finish(file_.file(), 0);
    file_.publish();
  }

  TorchArchive archive_;
  PendingFile file_;
};

/// One contiguous dataset per tensor, for h5py.File(path)["encoder.weight"][:], in the root group under
/// hdf5_path("/", NAME), of the element types of hdf5_image.h; the other names of a tied tensor are hard
/// links to its dataset. Throws CheckpointError for more than 32 dimensions.
class Hdf5FileWriter : public ModelWriter {
 public:
  Hdf5FileWriter(const Disk& disk, ModelWriterOptions options)
      : ModelWriter(std::move(options.tensors)),
        image_(build(options.path.filename().string(), tensors())),
        file_(disk, options.path) {
    file_.file().reserve(image_.file_bytes);
  }

 private:
  static Hdf5Image build(const std::string& purpose, const std::vector<ModelTensor>& tensors) {
    Hdf5Builder builder(purpose, Hdf5Readers::kSince1_8);
    for (const ModelTensor& tensor : tensors) {
      builder.add({hdf5_path("/", tensor.name), tensor.type, tensor.shape, {}});
      for (const std::string& alias : tensor.aliases)
        builder.add_link(hdf5_path("/", tensor.name), hdf5_path("/", alias));
    }
    return builder.finish();
  }

  void write(size_t index, int64_t offset, std::span<const std::byte> data) override {
    file_.file().write_at(image_.offsets[index] + offset, data);
  }

  void publish() override {
    for (const Hdf5Image::Piece& piece : image_.metadata)
      file_.file().write_at(piece.offset, std::as_bytes(std::span(piece.bytes)));
    file_.publish();
  }

  Hdf5Image image_;
  PendingFile file_;
};

/// Whether files of the format have the element type.
bool has_type(ModelFormat format, DType type) {
  switch (format) {
    case ModelFormat::kSafetensors: return is_safetensors_type(type);
    case ModelFormat::kHdf5: return is_hdf5_type(type);
    case ModelFormat::kTorch: return type < DType::kInt1;  // torch.load knows no others
  }
  return false;
}

void check_name(const std::string& name, std::set<std::string_view>& seen) {
  if (name.empty()) throw CheckpointError("a tensor has an empty name");
  if (!is_utf8(name)) throw CheckpointError("tensor ", quoted_name(name), ": its name is not UTF-8");
  if (!seen.insert(name).second) throw CheckpointError("tensor ", quoted_name(name), " occurs twice");
}

// Including the copies that a format may need for tied names.
int64_t checked_bytes(const ModelTensor& tensor) {
  int64_t bytes = size_bytes(tensor.type);
  bool overflow = false;
  for (const int64_t size : tensor.shape) {
    if (size < 0) throw CheckpointError("tensor ", quoted_name(tensor.name), " has a negative size, ", size);
    overflow = overflow || __builtin_mul_overflow(bytes, size, &bytes);
  }
  overflow =
      overflow || __builtin_mul_overflow(bytes, static_cast<int64_t>(1 + tensor.aliases.size()), &bytes);
  if (overflow)
    throw CheckpointError("tensor ", quoted_name(tensor.name), " has more bytes than 63 bits can count");
  return bytes;
}

}  // namespace

int64_t ModelTensor::bytes() const { return numel_of(shape) * size_bytes(type); }

std::string_view name_of(ModelFormat format) {
  switch (format) {
    case ModelFormat::kSafetensors: return "safetensors";
    case ModelFormat::kTorch: return "pt";
    case ModelFormat::kHdf5: return "h5";
  }
  return "?";
}

std::optional<ModelFormat> model_format_of(const std::filesystem::path& path) {
  const std::string ending = path.extension().string();
  if (ending == ".safetensors") return ModelFormat::kSafetensors;
  if (ending == ".pt" || ending == ".pth" || ending == ".bin") return ModelFormat::kTorch;
  if (ending == ".h5" || ending == ".hdf5") return ModelFormat::kHdf5;
  return std::nullopt;
}

ModelWriter::ModelWriter(std::vector<ModelTensor> tensors) : tensors_(std::move(tensors)) {
  std::set<std::string_view> seen;
  int64_t room = std::numeric_limits<int64_t>::max() / 2;  // the rest is for headers and padding
  for (const ModelTensor& tensor : tensors_) {
    check_name(tensor.name, seen);
    for (const std::string& alias : tensor.aliases) check_name(alias, seen);
    const int64_t bytes = checked_bytes(tensor);
    if (bytes > room) throw CheckpointError("the model has more bytes than 62 bits can count");
    room -= bytes;
  }
}

void ModelWriter::append(std::span<const std::byte> data) {
  while (!data.empty()) {
    while (current_ < tensors_.size() && written_ == tensors_[current_].bytes()) {
      ++current_;
      written_ = 0;
    }
    TESSERA_CHECK(current_ < tensors_.size(), data.size(), " bytes more than the tensors have");
    const int64_t left = tensors_[current_].bytes() - written_;
    const auto piece = data.first(std::min(data.size(), static_cast<size_t>(left)));
    write(current_, written_, piece);
    written_ += static_cast<int64_t>(piece.size());
    data = data.subspan(piece.size());
  }
}

void ModelWriter::finish() {
  for (; current_ < tensors_.size(); ++current_, written_ = 0)
    TESSERA_CHECK(written_ == tensors_[current_].bytes(), "tensor ", tensors_[current_].name,
                  " is incomplete");
  publish();
}

std::unique_ptr<ModelWriter> open_model_writer(const Disk& disk, ModelWriterOptions options) {
  for (const ModelTensor& tensor : options.tensors)
    if (!has_type(options.format, tensor.type))
      throw CheckpointError(options.path, ": ", quoted_name(tensor.name), " is of type ",
                            name_of(tensor.type), ", which ", name_of(options.format), " files do not have; ",
                            has_type(ModelFormat::kTorch, tensor.type)
                                ? "expected a .pt file, which has it"
                                : "no format has it: keep its bytes in a tensor of uint8");
  if (options.format == ModelFormat::kSafetensors) return open_safetensors_writer(disk, std::move(options));
  if (options.max_shard_bytes > 0)
    throw CheckpointError(options.path, ": only safetensors can be cut into shards, not ",
                          name_of(options.format));
  if (options.format == ModelFormat::kTorch)
    return std::make_unique<TorchFileWriter>(disk, std::move(options));
  return std::make_unique<Hdf5FileWriter>(disk, std::move(options));
}

}  // namespace tessera::checkpoint

// ModelWriter: writes a full model to a file, or a folder of files, in the format of another program.
//
// Names, shapes and element types are known before the first byte of data. So every format computes its
// layout first and then writes the data at its final position: nothing is buffered or moved, and memory does
// not grow with the model. The output has a temporary name until finish(), so a reader sees a whole file or
// none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/files/disk.h"

namespace tessera::checkpoint {

/// A tensor of a full model: row-major, little-endian.
struct ModelTensor {
  std::string name;            ///< UTF-8, not empty
  std::vector<int64_t> shape;  ///< empty: a single element (0-dim)
  DType type = DType::kFloat32;
  std::vector<std::string> aliases;  ///< other names of the same (tied) tensor

  int64_t bytes() const;
};

enum class ModelFormat : uint8_t {
  kSafetensors,  ///< https://github.com/huggingface/safetensors
  kTorch,        ///< what torch.save writes for a state_dict: .pt, .bin
  kHdf5,         ///< one dataset per tensor
};

/// "safetensors", "pt", "h5".
std::string_view name_of(ModelFormat format);
/// The format of a file with this extension (".safetensors"; ".pt", ".pth", ".bin"; ".h5", ".hdf5"). nullopt
/// for any other.
std::optional<ModelFormat> model_format_of(const std::filesystem::path& path);

/// Takes a model's bytes and writes them in one format. Owns the temporary output and removes it
/// unless finish() returned. Not thread-safe.
class ModelWriter {
 public:
  virtual ~ModelWriter() = default;
  ModelWriter(const ModelWriter&) = delete;
  ModelWriter& operator=(const ModelWriter&) = delete;

  const std::vector<ModelTensor>& tensors() const { return tensors_; }

  /// The model's next bytes: those of the tensors in their order, concatenated, in pieces of any size.
  /// Throws DiskError.
  void append(std::span<const std::byte> data);
  /// Is called after the last byte. Syncs the output and renames it to its name, replacing a file of that
  /// name. Throws DiskError.
  void finish();

 protected:
  /// Throws CheckpointError, naming the tensor, for lists that no format can represent: names that are empty,
  /// not UTF-8 or duplicate, sizes that are negative or overflow.
  explicit ModelWriter(std::vector<ModelTensor> tensors);

  /// Writes bytes of tensor `index` at its byte `offset`; not called for a tensor without elements.
  virtual void write(size_t index, int64_t offset, std::span<const std::byte> data) = 0;
  virtual void publish() = 0;

 private:
  std::vector<ModelTensor> tensors_;
  size_t current_ = 0;   // index of the tensor of the next byte
  int64_t written_ = 0;  // of its bytes
};

struct ModelWriterOptions {
  ModelFormat format = ModelFormat::kSafetensors;
  /// A file; with max_shard_bytes a folder, which is created or replaced (see safetensors_writer.h).
  std::filesystem::path path;
  std::vector<ModelTensor> tensors;
  /// If it is not 0, the output is safetensors shards with at most this many bytes of tensors, and an index,
  /// as transformers' save_pretrained writes them.
  int64_t max_shard_bytes = 0;
};

/// Checks the list, creates the temporary output and reserves its disk space. `disk` must outlive the
/// writer. Throws CheckpointError for tensors that the format cannot represent, and DiskError.
std::unique_ptr<ModelWriter> open_model_writer(const Disk& disk, ModelWriterOptions options);
std::unique_ptr<ModelWriter> open_model_writer(const Disk&& disk, ModelWriterOptions options) = delete;

}  // namespace tessera::checkpoint

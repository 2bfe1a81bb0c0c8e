// TorchFile: reads what torch.save wrote, without torch and without executing anything: the zip archive of
// torch 1.6 and newer, and the legacy stream of pickles before it. Tensors are where they lie in the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/formats/pickle.h"
#include "checkpoint/formats/zip_directory.h"
#include "core/dtype.h"
#include "core/files/input_file.h"

namespace tessera::checkpoint {

/// A tensor of the file. All its elements lie within the file: this is checked.
struct TorchTensor {
  DType type = DType::kFloat32;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  ///< in elements, by dimension; not negative. 0 where the file has an element
                                 ///< once for many: numel() may be far more than the file has
  int64_t offset = 0;            ///< byte of the file where the first element is
  std::string storage;           ///< its storage's key: tensors with the same one share memory
  bool is_parameter = false;
  bool requires_grad = false;

  int64_t numel() const;
  bool is_contiguous() const;
};

/// "torch.float32" and the like: the names of torch's types.
std::optional<DType> torch_dtype(std::string_view global);

/// Reads one file, which another process may cut meanwhile: then reading is an error. Owns the open file.
/// Immutable; thread-safe.
class TorchFile {
 public:
  /// Reads the archive's directory and its pickle, whose checksum is compared; of tensors, nothing is read.
  /// Throws CheckpointError naming the file and what was found: no archive of torch.save, compressed entries,
  /// another byte order, a TorchScript program, sizes beyond the file, and what Pickle throws; DiskError.
  /// `bytes` from `begin` on: what torch.save wrote into a part of a file, which must lie within it; -1: to
  /// the file's end. Offsets of tensors are of the whole file.
  explicit TorchFile(const std::filesystem::path& path, int64_t begin = 0, int64_t bytes = -1);

  /// Whether the file begins as torch.save's do: as a zip archive with a data.pkl, or with the legacy magic
  /// number. False when it cannot be read.
  static bool recognizes(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return input_.path(); }
  const PickleValue& root() const { return pickle_->root(); }
  /// The tensor that a value would be (torch.Tensor, torch.nn.Parameter, a tensor of a subclass whose data is
  /// one). nullopt: the value is something else. Throws CheckpointError for a tensor that cannot be: outside
  /// of its storage, with a stride or size below 0, of an unknown type, sparse, quantized, on "meta".
  std::optional<TorchTensor> tensor(const PickleValue& value) const;
  /// What a value is, "a sparse tensor", where tensor() would throw because it reads none of that kind. Null:
  /// something else. Such a value may be left out, where one that is damaged may not.
  static const char* unread_tensor(const PickleValue& value);
  /// Reads the whole file, and compares the CRC-32 of each entry of the archive. False: the file has none,
  /// because it is of the legacy format, or torch.serialization.set_crc32_options(False) was set. Throws
  /// CheckpointError naming the entry that is damaged.
  bool verify() const;
  /// `bytes` bytes from byte `offset` of the file on, as of a tensor. Throws DiskError.
  std::string read(int64_t offset, int64_t bytes) const;

 private:
  struct StorageId;
  struct Place {  // bytes of the part
    int64_t offset = 0;
    int64_t bytes = 0;
  };

  template <class... Args>
  [[noreturn]] void fail(const Args&... args) const {
    throw CheckpointError(path(), ": ", args...);
  }
  [[noreturn]] void fail_start(const std::string& start) const;
  std::string read_part(int64_t offset, int64_t bytes) const { return read(begin_ + offset, bytes); }
  ReadBytes reader() const {
    return [this](int64_t offset, int64_t bytes) { return read_part(offset, bytes); };
  }
  void read_archive();
  std::unique_ptr<Pickle> read_pickle(int64_t offset, int64_t bytes) const;
  std::string small_entry(const std::string& name) const;
  void read_legacy();
  void place_legacy_storages(const PickleValue& keys, int64_t position);

  int64_t integer(const PickleValue& value, const char* what) const;
  std::vector<int64_t> integers(const PickleValue& value, const char* what) const;
  StorageId storage_id(const PickleValue& value) const;
  TorchTensor built(std::string_view builder, const std::vector<const PickleValue*>& arguments) const;
  void check_within(const TorchTensor& tensor, int64_t offset, int64_t available) const;

  InputFile input_;
  int64_t begin_ = 0;       // of the part in the file
  int64_t part_bytes_ = 0;  // what torch.save wrote; offsets count from its first byte
  std::unique_ptr<Pickle> pickle_;
  std::vector<ZipEntry> entries_;
  std::string archive_;  // "NAME/", which all entries begin with
  bool has_checksums_ = false;
  std::map<std::string, Place> storages_;  // by key
};

}  // namespace tessera::checkpoint

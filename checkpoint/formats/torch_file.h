// TorchFile: reads what torch.save wrote, without torch and without executing anything: the zip archive of
// torch 1.6 and newer, and the legacy stream of pickles before it. Tensors are where they lie in the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/formats/pickle.h"
#include "core/dtype.h"

namespace tessera::checkpoint {

/// A tensor of the file. All its elements lie within the file: this is checked.
struct TorchTensor {
  DType type = DType::kFloat32;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  ///< in elements, by dimension; not negative. 0 where the file has an element
                                 ///< once for many: numel() may be far more than the file has
  int64_t offset = 0;            ///< byte of the file where the first element is
  std::string storage;           ///< its storage's key: tensors with the same one share memory
  int64_t storage_bytes = 0;
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
  explicit TorchFile(const std::filesystem::path& path, const PickleLimits& limits = {});
  /// The same of what torch.save wrote into a part of a file: `bytes` from `begin` on, which must lie within
  /// it. Offsets of tensors, and bytes(), are of the whole file.
  TorchFile(const std::filesystem::path& path, int64_t begin, int64_t bytes, const PickleLimits& limits = {});
  TorchFile(TorchFile&&) noexcept;
  TorchFile& operator=(TorchFile&&) = delete;
  ~TorchFile();

  /// Whether the file begins as torch.save's do: as a zip archive with a data.pkl, or with the legacy magic
  /// number. False when it cannot be read.
  static bool recognizes(const std::filesystem::path& path);

  const std::filesystem::path& path() const;
  const PickleValue& root() const;
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
  int64_t bytes() const;  ///< of the file, when it was opened
  /// `bytes` bytes from byte `offset` of the file on, as of a tensor. Throws DiskError.
  std::string read(int64_t offset, int64_t bytes) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint

// Reads safetensors: the header, the hashes that Tessera adds to it, the index of a model in several files,
// and one file. Files are untrusted: everything is checked.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "core/files/disk.h"

namespace tessera::checkpoint {

inline constexpr std::string_view kSafetensorsMetadata = "__metadata__";

/// The types are in ascending order: the reference implementation writes tensors of the last type first. Its
/// F4 counts numbers, of which torch's type has two an element, so it stands for none of ours.
inline constexpr std::array<std::pair<DType, std::string_view>, 19> kSafetensorsTypes = {{
    {DType::kBool, "BOOL"},
    {DType::kUInt8, "U8"},
    {DType::kInt8, "I8"},
    {DType::kFloat8E5m2, "F8_E5M2"},
    {DType::kFloat8E4m3fn, "F8_E4M3"},
    {DType::kFloat8E8m0fnu, "F8_E8M0"},
    {DType::kFloat8E4m3fnuz, "F8_E4M3FNUZ"},
    {DType::kFloat8E5m2fnuz, "F8_E5M2FNUZ"},
    {DType::kInt16, "I16"},
    {DType::kUInt16, "U16"},
    {DType::kFloat16, "F16"},
    {DType::kBFloat16, "BF16"},
    {DType::kInt32, "I32"},
    {DType::kUInt32, "U32"},
    {DType::kFloat32, "F32"},
    {DType::kComplex64, "C64"},
    {DType::kFloat64, "F64"},
    {DType::kInt64, "I64"},
    {DType::kUInt64, "U64"},
}};

/// Whether the format has the type.
inline bool is_safetensors_type(DType type) {
  return std::any_of(kSafetensorsTypes.begin(), kSafetensorsTypes.end(),
                     [&](const auto& entry) { return entry.first == type; });
}

/// Index in kSafetensorsTypes, which has the type.
inline size_t safetensors_rank(DType type) {
  const auto* found = std::find_if(kSafetensorsTypes.begin(), kSafetensorsTypes.end(),
                                   [&](const auto& entry) { return entry.first == type; });
  return static_cast<size_t>(found - kSafetensorsTypes.begin());
}

/// "F32".
inline std::string_view safetensors_type(DType type) {
  return kSafetensorsTypes[safetensors_rank(type)].second;
}

// The header of a safetensors file (https://github.com/huggingface/safetensors#format):
//
//   8 bytes   N, the header's length: unsigned, little-endian
//   N bytes   JSON, starts with '{', may be padded with spaces: {"NAME": {"dtype": "F32", "shape": [2, 3],
//             "data_offsets": [BEGIN, END]}, …, "__metadata__": {"key": "text", …}}
//   the rest  the tensors' bytes; offsets count from here; without holes and without overlap

/// The reference implementation refuses a longer one.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct SafetensorsTensor {
  std::string name;
  std::vector<int64_t> shape;
  DType type = DType::kFloat32;
  int64_t offset = 0;  ///< in bytes; from the start of the data in a header, from the start of the file in a
                       ///< SafetensorsFile
  int64_t bytes = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  ///< by offset
  std::map<std::string, std::string> metadata;
};

/// Sorts tensors and sets `bytes` and `offset` of each, in the order of the reference implementation:
/// wide types first, so that all tensors are aligned; then by name.
void place_tensors(std::vector<SafetensorsTensor>& tensors);

/// The file's first bytes, up to the data: a multiple of 8. Throws CheckpointError beyond
/// kMaxSafetensorsHeaderBytes and for a tensor named "__metadata__"; messages start with `file`.
std::string format_safetensors_header(const SafetensorsHeader& header, const std::string& file);

/// `text` is the N bytes of JSON, `data_bytes` the length of the rest. Memory in proportion to `text`.
/// Throws CheckpointError naming `file`, tensor, found and expected value: for text that is not JSON of this
/// form, keys that are duplicate or unknown, types that are not a DType, offsets that do not fit the shape,
/// leave holes, overlap, or do not end where the file does.
SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t data_bytes,
                                           const std::string& file);

// model.safetensors.index.json: the file of each tensor of a model in shards, as transformers writes it:
// {"metadata": {…}, "weight_map": {"encoder.weight": "model-00001-of-00002.safetensors", …}}

inline constexpr const char* kSafetensorsIndexName = "model.safetensors.index.json";

/// The weight_map: file by name of tensor. Memory in proportion to `text`; other keys are skipped.
/// Throws CheckpointError naming `file` for text that is not JSON of this form, duplicate tensors, and files
/// outside of the index's folder.
std::map<std::string, std::string> parse_safetensors_index(std::string_view text, const std::string& file);

// Hashes in a safetensors file's metadata, with which our reader detects damage. Other readers ignore them.
//
// Hashes in safetensors.
// __metadata__ of a file that Tessera writes has two entries:
//
//   "tessera_blocks"  XXH3-64 (seed 0) of each 1 MiB of each tensor's bytes, of which the last block of a
//                     tensor may be shorter; tensors in the order of their data; 16 lower-case hexadecimal
//                     digits per hash, concatenated
//   "tessera_digest"  XXH3-128 (seed 0) of the head (the 8 bytes of the header's length and the header), with
//                     these 32 digits replaced by zeros
//
// So every bit of the file is covered, and a reader of a part verifies only the blocks it reads. The writer,
// which writes tensors by position, needs only each tensor's own bytes in their order; it first writes the
// head with zeros in place of the hashes. A file without the two entries is read without verification.

/// Adds both entries, with zeros as hashes, to a header whose tensors have offsets.
void reserve_digest(SafetensorsHeader& header);

/// Writes the hashes of all blocks, in the order of the tensors' data, and the digest over the zeros
/// that reserve_digest put into `head`.
void fill_digest(std::string& head, const std::vector<uint64_t>& block_hashes);

/// Gives the hashes in a file's metadata, by tensor. Immutable.
class SafetensorsHashes {
 public:
  /// `head` is the file's bytes up to the data, `header` what was read from it. nullopt for a file
  /// without hashes. Throws CheckpointError naming `file` when the head does not match its digest, or one of
  /// the two entries is missing or malformed.
  static std::optional<SafetensorsHashes> read(std::string_view head, const SafetensorsHeader& header,
                                               const std::string& file);

  /// The hash of block `block` of header.tensors[index].
  uint64_t expected(size_t index, int64_t block) const {
    return hashes_[static_cast<size_t>(first_block_[index] + block)];
  }

 private:
  std::vector<uint64_t> hashes_;
  std::vector<int64_t> first_block_;  // by tensor
};

/// Reads one file. Immutable; thread-safe.
class SafetensorsFile {
 public:
  /// Opens the file and checks the whole header, so that every tensor in tensors() can be read. If the
  /// file has hashes, the header is verified. Throws CheckpointError and DiskError, naming the file (and
  /// tensor).
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return input_.path(); }
  /// Sorted by offset, which is from the start of the file.
  const std::vector<SafetensorsTensor>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  /// nullptr when there is none.
  const SafetensorsTensor* find(std::string_view name) const;
  bool has_hashes() const { return hashes_.has_value(); }
  /// Fills `destination` from byte `offset` of the file on, within one tensor. If the file has hashes, every
  /// block touched is read whole and verified: throws CheckpointError naming file, tensor and block. Throws
  /// DiskError when the file has become shorter, std::logic_error for a range outside of a tensor.
  void read_at(int64_t offset, std::span<std::byte> destination) const;

 private:
  /// `tensor`: of header_.
  void read_block(const SafetensorsTensor& tensor, int64_t block, std::span<std::byte> into) const;

  InputFile input_;
  std::optional<SafetensorsHashes> hashes_;
  SafetensorsHeader header_;
  std::map<std::string_view, const SafetensorsTensor*> by_name_;
};

}  // namespace tessera::checkpoint

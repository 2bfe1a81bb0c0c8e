// ElementSource: reads the elements of a checkpoint's tensors, whoever has written the files. An element is
// addressed by the parameter, the buffer or the rank that has it: where it lies is the source's alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/sharded/manifest.h"
#include "core/dtype.h"

namespace tessera::checkpoint {

/// Names a tensor of a checkpoint.
struct TensorId {
  enum class Kind : uint8_t {
    kWeights,  ///< of a parameter: the fp32 master of a trainable one
    kState,    ///< of a trainable parameter's optimizer, fp32, of the parameter's shape
    kBuffer,   ///< of the model
    kBlob,     ///< bytes of one rank, (n) uint8
  };
  Kind kind = Kind::kWeights;
  int index = 0;          ///< of the parameter in SavedLayout; of the buffer in Manifest::tensors; the rank
  std::string name = {};  ///< of the state, of the blob

  static TensorId weights(int parameter) { return {Kind::kWeights, parameter}; }
  static TensorId state(int parameter, std::string name) {
    return {Kind::kState, parameter, std::move(name)};
  }
  static TensorId buffer(size_t index) { return {Kind::kBuffer, static_cast<int>(index)}; }
  static TensorId blob(int rank, std::string name) { return {Kind::kBlob, rank, std::move(name)}; }
};

struct StoredTensor {
  DType type = DType::kFloat32;
  std::vector<int64_t> shape;

  int64_t numel() const;
  int64_t bytes() const { return numel() * size_bytes(type); }
};

/// Consecutive elements that lie together in a file.
struct Extent {
  int file = 0;
  int64_t offset = 0;  ///< byte of the file
  int64_t numel = 0;
};

struct VerifyReport {
  int64_t num_blocks = 0;
  int64_t bytes = 0;         ///< read
  int64_t num_archives = 0;  ///< of another program's: those of torch.save whose CRC-32 were compared
  /// Elements of weights and states that are NaN or infinite: of another program's checkpoint alone, which
  /// has no hashes. Its tensors count as blocks.
  int64_t num_nonfinite = 0;
  /// Has texts such as "rank_00001.h5: block 7 (bytes 7340032 to 8388608, /exp_avg/unit_00002) is damaged:
  /// …".
  std::vector<std::string> problems;
  std::vector<std::string> by_file;  ///< the first problem of each file of the manifest; empty: it is whole
  bool ok() const { return problems.empty(); }
};

/// Logically immutable; thread-safe.
class ElementSource {
 public:
  virtual ~ElementSource() = default;
  ElementSource(const ElementSource&) = delete;
  ElementSource& operator=(const ElementSource&) = delete;

  /// Type and shape as saved. nullopt: the checkpoint has no such buffer or blob.
  std::optional<StoredTensor> find(const TensorId& id) const;
  /// Where elements from `first` on lie, `most` at most. Reading in the order of files and offsets reads each
  /// block once.
  virtual Extent extent(const TensorId& id, int64_t first, int64_t most) const = 0;
  /// Fills `destination` with whole elements from `first` on, as saved, and verifies them as far as the
  /// source can. Throws CheckpointError naming the file and what is damaged; `destination` is then undefined.
  virtual void read(const TensorId& id, int64_t first, std::span<std::byte> destination) const = 0;
  /// Reads and verifies what read() would, and discards it; what has hashes is verified once in the lifetime
  /// of this object. Throws as read() does.
  virtual void check(const TensorId& id, int64_t first, int64_t numel) const = 0;
  /// Reads everything and compares it with all hashes and checksums that there are; continues after an error.
  virtual VerifyReport verify() const = 0;
  /// Equal for checkpoints of the same state and elements. Where elements have no hashes, it reads some of
  /// them. Throws as read() does.
  virtual std::string digest() const = 0;
  /// Bytes read from files since they were opened.
  int64_t bytes_read() const { return bytes_read_; }

  /// A whole tensor's bytes. Throws CheckpointError for one that is not there, and as read() does.
  std::vector<std::byte> read_all(const TensorId& id) const;

 protected:
  explicit ElementSource(std::shared_ptr<const Manifest> manifest) : manifest_(std::move(manifest)) {}
  /// find() of a buffer or a blob: the manifest's layout has the parameters.
  virtual std::optional<StoredTensor> find_whole(const TensorId& id) const = 0;

  const std::shared_ptr<const Manifest> manifest_;
  mutable std::atomic<int64_t> bytes_read_ = 0;
};

}  // namespace tessera::checkpoint

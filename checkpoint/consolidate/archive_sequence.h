// ArchiveSequence: writes many of torch.save's archives one after another, while the tensors in them are
// streamed: at any time one of them is in memory, without its tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/formats/torch_archive.h"
#include "core/files/disk.h"

namespace tessera::checkpoint {

/// An archive to be written.
struct PlannedArchive {
  struct Storage {
    int64_t bytes = 0;                   ///< of a tensor that is streamed
    std::optional<std::string> content;  ///< of one that is not: all its bytes
  };
  std::string pickle;
  std::vector<Storage> storages;

  /// Adds a storage; returns its number.
  size_t stream(int64_t bytes);
  size_t place(std::string content);
};

/// A derived class says which archives there are and where they are written. The tensors are those of the
/// archives' streamed storages, in order. Not thread-safe.
class ArchiveSequence {
 public:
  virtual ~ArchiveSequence() = default;
  ArchiveSequence(const ArchiveSequence&) = delete;
  ArchiveSequence& operator=(const ArchiveSequence&) = delete;

  /// The next bytes of a tensor: what stream_tensors() calls.
  void write(size_t tensor, std::span<const std::byte> data);
  /// Writes what is left, after the last tensor.
  void finish();

 protected:
  ArchiveSequence() = default;
  /// The next archive; nullopt after the last.
  virtual std::optional<PlannedArchive> next() = 0;
  /// The file and the byte of it where the archive of this length begins.
  virtual std::pair<OutputFile*, int64_t> open(int64_t bytes) = 0;
  /// The archive is complete.
  virtual void close() = 0;

 private:
  bool advance();
  void complete();

  std::optional<TorchArchive> archive_;  // the one that is being written
  PlannedArchive plan_;
  OutputFile* file_ = nullptr;
  int64_t base_ = 0;
  std::vector<size_t> streamed_;  // the storages that are
  size_t first_tensor_ = 0;       // of these
  size_t tensor_ = 0;             // the one that is being written
  int64_t written_ = 0;           // of its bytes
};

/// The bytes of a tensor of one float, as torch's optimizers count their steps.
std::string float_bytes(float value);

}  // namespace tessera::checkpoint

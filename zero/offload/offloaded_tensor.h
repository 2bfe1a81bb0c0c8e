// OffloadedTensor: a flat tensor of model state that lies in a file while it is not used. See [Note: state on
// disk] in offload_store.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "zero/memory/unit_memory.h"
#include "zero/offload/offload_store.h"

namespace tessera::zero {

/// Keeps one tensor on disk, and in memory while it is held.
class OffloadedTensor {
 public:
  enum class Access {
    kRead,
    kReadWrite,
    kOverwrite,  ///< contents are unspecified until written: nothing is read
  };

  /// (numel) zeros.
  OffloadedTensor(OffloadStore& store, int64_t numel, at::ScalarType dtype, std::string description);
  ~OffloadedTensor();
  OffloadedTensor(const OffloadedTensor&) = delete;

  /// Readable between acquire() and release(). Always the same storage: views of it stay valid.
  const at::Tensor& tensor() const { return memory_.full(); }
  /// Waits until the tensor is in memory, and starts reading what comes next. Counted: as many
  /// release() follow. Throws Error.
  void acquire(Access access);
  /// Starts writing what was changed, unless it is used again soon.
  void release();
  /// These, of one store, come next, outside of the order of a step: see OffloadStore::expect().
  static void expect(const std::vector<OffloadedTensor*>& tensors) {
    if (!tensors.empty()) tensors.front()->store_.expect(tensors);
  }

 private:
  friend class OffloadStore;
  enum class Transfer { kNone, kReading, kWriting };
  int64_t reserved() const { return SpillFile::rounded_up(memory_.bytes()); }
  std::span<std::byte> buffer_bytes() const;
  bool transfer_done() const { return store_.file_.done(ticket_); }
  void start_reading();
  void start_writing();
  void finish_transfer();
  void free_buffer();
  void get_buffer(Access access);
  void let_go();

  OffloadStore& store_;
  UnitMemory memory_;
  int number_;      // in the store
  int64_t offset_;  // in the file
  SpillFile::Transfer ticket_ = 0;
  Transfer transfer_ = Transfer::kNone;
  int holders_ = 0;
  bool changed_ = false;   // since it was read or written
  int64_t wanted_in_ = 0;  // the store's last answer that has it
};

}  // namespace tessera::zero

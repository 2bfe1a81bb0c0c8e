// OffloadedTensor: a flat tensor of model state that lies in a file while it is not used.
//
// [Note: state on disk]
// The tensor keeps its shape over guarded address space (UnitMemory), as a resharded unit does. prefetch()
// starts reading it into a buffer; acquire() waits and makes it readable at that buffer; release() writes it
// back, when it was changed, without waiting. So all that is in memory are the OffloadStore's buffers, whose
// bytes are bounded: a prefetch that finds no room does nothing, and an acquire() that finds none first waits
// for writes, then takes what was fetched ahead and is not used yet, and only then exceeds the bound. What
// order to fetch in is known to those who use the tensors: see ReadAhead.
//
// The file has no name, is reserved when it is made, and reads as zeros until it is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/spill_file.h"
#include "zero/buffer_pool.h"
#include "zero/unit_memory.h"

namespace tessera::zero {

class OffloadedTensor;

struct OffloadOptions {
  std::string directory;  ///< where the file is
  int num_buffers = 13;   ///< of the largest tensor's size: what may be in memory at once
  /// Tests: see SpillFileOptions::probe.
  std::function<int(std::string_view operation, int64_t offset, int64_t bytes)> probe = {};
};

/// Owns the file and the buffers of one rank's OffloadedTensors, which must not outlive it. Thread-safe.
class OffloadStore {
 public:
  /// Local. `sizes`: bytes of every tensor that will be made. Throws Error when there is no room on the disk.
  OffloadStore(const OffloadOptions& options, const std::vector<int64_t>& sizes, const std::string& purpose);
  OffloadStore(const OffloadStore&) = delete;

  int64_t bytes_on_disk() const { return allocated_; }
  /// Most bytes of buffers at one time.
  int64_t peak_buffer_bytes() const { return buffers_.peak_bytes(); }
  int64_t budget() const { return budget_; }
  int64_t bytes_read() const { return file_.bytes_read(); }
  int64_t bytes_written() const { return file_.bytes_written(); }
  /// Local. Waits for what is being written. Throws Error.
  void finish_writes();

 private:
  friend class OffloadedTensor;
  static int64_t reserved(int64_t bytes);  ///< in the file, and in memory
  int64_t allocate(int64_t bytes);
  bool has_room(int64_t bytes) const { return buffers_.lent_bytes() + bytes <= budget_; }
  void make_room(int64_t bytes);

  std::recursive_mutex mutex_;  // guards what follows, and the tensors' states
  SpillFile file_;
  int64_t budget_;
  BufferPool buffers_;
  int64_t allocated_ = 0;
  std::deque<OffloadedTensor*> writing_;      // oldest first
  std::vector<OffloadedTensor*> prefetched_;  // and not used yet, in the order of their reads
};

class OffloadedTensor {
 public:
  enum class Access {
    kRead,
    kReadWrite,
    kOverwrite,  ///< contents are unspecified until written: nothing is read
  };

  /// Local. (numel) zeros.
  OffloadedTensor(OffloadStore& store, int64_t numel, at::ScalarType dtype, std::string description);
  ~OffloadedTensor();
  OffloadedTensor(const OffloadedTensor&) = delete;

  /// Readable between acquire() and release(). Always the same storage: views of it stay valid.
  const at::Tensor& tensor() const { return memory_.full(); }
  /// Local. Starts reading. False: there is no room.
  bool prefetch();
  /// Local. Waits until the tensor is in memory. Counted: as many release() follow. Throws Error.
  void acquire(Access access);
  /// Local. Starts writing what was changed. Throws Error.
  void release();

 private:
  friend class OffloadStore;
  enum class Transfer { kNone, kReading, kWriting };
  void start_reading(at::Tensor buffer);
  void finish_transfer();
  void free_buffer();
  std::span<std::byte> buffer_bytes() const;

  OffloadStore& store_;
  UnitMemory memory_;
  int64_t offset_;  // in the file
  SpillFile::Transfer ticket_ = 0;
  Transfer transfer_ = Transfer::kNone;
  int holders_ = 0;
  bool changed_ = false;
};

/// Fetches tensors ahead of their use, in a known order.
class ReadAhead {
 public:
  using Step = std::vector<OffloadedTensor*>;  // used together
  /// Local. What will be used, in order. Starts reading.
  void plan(std::vector<Step> steps);
  /// Local. Step `index` is about to be used: reads on behind it. Steps may be skipped.
  void reached(size_t index);

 private:
  /// More would take room from others that read ahead.
  static constexpr size_t kMaxSteps = 3;

  void read_on(size_t end);
  std::vector<Step> steps_;
  size_t next_ = 0;  // the first step that has not been fetched
};

}  // namespace tessera::zero

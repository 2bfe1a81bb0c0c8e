// OffloadStore: a rank's state on disk, and the bounded memory that it passes through.
//
// [Note: state on disk]
// An OffloadedTensor keeps its shape over guarded address space (UnitMemory), as a resharded unit does.
// acquire() makes it readable at a buffer; release() lets it go. So all that is in memory are the store's
// buffers, whose bytes are bounded. Which tensors have them is decided as for units ([Note: residency is a
// cache] in gather_plan.h): the order of use is known from the step before (AccessOrder), so the tensors that
// come next, up to the bound, are fetched ahead or stay; others that were changed are written at once, and
// leave when their room is needed. An acquire() that finds no room first waits for writes, then takes the
// room of the tensor that is used last, and only then exceeds the bound.
//
// The file has no name, is reserved when it is made, and reads as zeros until it is written.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/memory/host_transfer.h"
#include "core/async_io/spill_file.h"
#include "zero/memory/buffer_pool.h"
#include "zero/plan/access_order.h"

namespace tessera::zero {

class OffloadedTensor;

struct OffloadOptions {
  std::string directory;  ///< where the file is
  int num_buffers = 13;   ///< of the largest tensor's size: what may be in memory at once
  /// Copies between the buffers and the device.
  std::shared_ptr<comm::HostTransfer> transfer = nullptr;
};

/// Keeps state in a file, and brings what is used next into memory ahead. Owns the file and the buffers of
/// one rank's OffloadedTensors, which must not outlive it. Thread-safe.
class OffloadStore {
 public:
  /// `sizes`: bytes of every tensor that will be made. Throws Error when there is no room on the disk.
  OffloadStore(const OffloadOptions& options, const std::vector<int64_t>& sizes, const std::string& purpose);
  OffloadStore(const OffloadStore&) = delete;

  /// A step of training begins, which will use what the last one has used, in the same order.
  void begin_step();
  /// These come next, once each, to be read; the step goes on after them.
  void expect(const std::vector<OffloadedTensor*>& tensors);
  /// Writes what was changed and waits for it. Throws Error.
  void flush();

  int64_t bytes_on_disk() const { return allocated_; }
  /// Most bytes of buffers at one time.
  int64_t peak_buffer_bytes() const { return buffers_.peak_bytes(); }
  int64_t budget() const { return budget_; }
  int64_t bytes_read() const { return file_.bytes_read(); }
  int64_t bytes_written() const { return file_.bytes_written(); }

 private:
  friend class OffloadedTensor;
  int64_t allocate(int64_t bytes);
  bool has_room(int64_t bytes) const { return buffers_.lent_bytes() + bytes <= budget_; }
  bool wanted(const OffloadedTensor& tensor) const;
  void find_wanted();
  void look_ahead();
  OffloadedTensor* used_last_of_unwanted() const;
  void free_unwanted(int64_t bytes);
  void make_room(int64_t bytes);

  std::recursive_mutex mutex_;  // guards what follows, and the tensors' states
  SpillFile file_;
  int64_t budget_;
  BufferPool buffers_;
  int64_t allocated_ = 0;

  AccessOrder order_;
  std::vector<OffloadedTensor*> tensors_;  // by number; null: gone
  struct Wanted {
    OffloadedTensor* tensor;
    bool overwrite;
  };
  std::vector<Wanted> wanted_;  // come next and have room together, soonest first
  int64_t look_ = 0;            // counts the answers to what is wanted
  int64_t held_bytes_ = 0;      // of tensors between acquire() and release()

  // Tensors that have a buffer and no holder:
  std::vector<OffloadedTensor*> idle_;    // or are being read, longest in memory first
  std::deque<OffloadedTensor*> writing_;  // oldest first; some have holders
};

}  // namespace tessera::zero

// SpillFile: memory of this process kept on disk, as DeepSpeed's ZeRO-Infinity keeps optimizer state and
// parameters on NVMe. The file has no name, so that it ends with the process however that ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/files/disk_error.h"

namespace tessera {

struct SpillFileOptions {
  std::string directory;     ///< made if it does not exist (its parents too), and never removed
  int64_t bytes = 0;         ///< reserved at once; contents read as zeros until written
  std::string purpose = {};  ///< for error messages: "optimizer state of rank 3"
  std::string key = "zero_optimization.offload_*.nvme_path";  ///< and the key that names the directory
  bool direct = true;                                         ///< O_DIRECT where the file system has it
  int num_threads = 4;                                        ///< that call pread and pwrite, 1 to 256
  int64_t piece_bytes = 4 << 20;  ///< larger transfers are split; a multiple of kAlignment, at most 1 GiB
};

/// Keeps blocks of memory in a file. Owns the file and the threads that read and write it. Thread-safe.
///
/// Transfers run at the same time and in any order: two that overlap and of which one writes must not be
/// under way together. The memory of a transfer must stay, and of a read must not be touched, until it is
/// done.
///
/// Without O_DIRECT (as on some file systems, or if options.direct is false) a write is done when it is on
/// the disk, and neither kind leaves pages in the page cache.
///
/// A forked child has no such threads: there read(), write(), done() and wait() throw, and the destructor
/// only closes the file.
class SpillFile {
 public:
  static constexpr int64_t kAlignment = 4096;  ///< of offsets, lengths and addresses
  static constexpr int64_t rounded_up(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  /// A read or write that was started. 0: none, which is always done.
  using Transfer = int64_t;

  /// Throws DiskError, one line: the directory, the bytes wanted and available, what to do.
  explicit SpillFile(const SpillFileOptions& options);
  /// Waits for the pieces that its threads have begun; those in the queue are dropped. Nothing is
  /// left in the directory.
  ~SpillFile();
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  /// Starts a transfer and does not wait: what its threads have no time for waits in this object. Offset,
  /// length and address are multiples of kAlignment and inside of the file (its size is options.bytes,
  /// rounded up). An empty span gives 0.
  Transfer read(int64_t offset, std::span<std::byte> into);
  Transfer write(int64_t offset, std::span<const std::byte> from);
  /// Does not wait. True also if it has failed: wait() throws then.
  bool done(Transfer transfer) const;
  /// Any thread may wait for any transfer. Throws DiskError if it has failed, at every call with its
  /// number: what was read or written for which purpose, the directory, the reason, what to do. A failure
  /// concerns this transfer only. What a failed one has read or written is undefined.
  void wait(Transfer transfer);

  /// Bytes of the transfers that have ended well.
  int64_t bytes_read() const;
  int64_t bytes_written() const;
  bool direct() const;  ///< O_DIRECT is in use

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera

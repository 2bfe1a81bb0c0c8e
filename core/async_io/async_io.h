// AsyncIo: reads and writes of one open file in the background, many at a time. Two implementations: io_uring
// (Linux 5.6 or newer, where the system allows it) and threads that call pread and pwrite.
//
// The kernel cancels what an ending thread has submitted and hands to its workers. So callers do not submit:
// they put pieces into a queue and wake the ring's own thread by an eventfd that the ring polls. That thread
// alone submits and reaps, which goes on while no caller waits. It tells the end of each piece by `finished`.
//
// What buffered I/O leaves.
// A file that is not opened with O_DIRECT goes through the page cache, which would grow by all that is read
// and written. So each piece of such a file ends with its pages leaving the cache: writes are first written
// back (sync_file_range), because the kernel only drops clean pages, then posix_fadvise(POSIX_FADV_DONTNEED).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

namespace tessera {

/// One read or write of consecutive bytes, and how far it has come.
struct IoPiece {
  enum class Step { kTransfer, kWriteBack, kDropCache, kDone };
  static constexpr int kEndOfFile = -1;

  bool is_write = false;
  int64_t offset = 0;  ///< in the file
  std::byte* data = nullptr;
  int64_t bytes = 0;     ///< at most kLargestCall (core/files/file_descriptor.h)
  int64_t transfer = 0;  ///< the caller's number

  Step step = Step::kTransfer;
  int64_t transferred = 0;
  int num_busy = 0;  ///< how often the kernel answered EAGAIN
  int error = 0;     ///< errno or kEndOfFile; valid when done
};

struct AsyncIoOptions {
  int descriptor = -1;       ///< must stay open
  bool direct = false;       ///< the descriptor has O_DIRECT
  int64_t alignment = 4096;  ///< direct I/O continues at its multiples
  int queue_depth = 32;      ///< io_uring: pieces under way at once, 1 to 4096
  int num_threads = 4;       ///< of the other implementation
  /// Called before each read and write; an errno value other than 0 is taken as its result. May be empty.
  std::function<int(std::string_view operation, int64_t offset, int64_t bytes)> probe;
  /// Called once for each piece that has ended, on a thread of AsyncIo, one or several at a time. Must not
  /// throw or call AsyncIo.
  std::function<void(const IoPiece& piece)> finished;
};

/// Reads and writes parts of a file in the background. Owns its threads, not the file. Thread-safe. Not to be
/// used in a forked child.
class AsyncIo {
 public:
  /// Waits for the pieces that the kernel has. Those still queued are dropped: `finished` is not called.
  virtual ~AsyncIo() = default;
  AsyncIo(const AsyncIo&) = delete;
  AsyncIo& operator=(const AsyncIo&) = delete;

  /// Queues the pieces and does not wait. Their memory must stay until each has ended.
  virtual void start(std::span<const IoPiece> pieces) = 0;

 protected:
  explicit AsyncIo(AsyncIoOptions options) : options_(std::move(options)) {}

  /// What the probe says about the next step: 0 or a negative errno value.
  int64_t probe(const IoPiece& piece) const;
  /// Takes the result of a step: a number of bytes, or a negative errno value.
  void advance(IoPiece& piece, int64_t result) const;
  /// All steps that are left, on this thread.
  void run_to_end(IoPiece& piece) const;

  const AsyncIoOptions options_;

 private:
  int64_t perform(const IoPiece& piece) const;
};

/// Null if the kernel has no io_uring, or does not let this process use it.
std::unique_ptr<AsyncIo> make_uring_io(const AsyncIoOptions& options);
/// Throws std::system_error: no thread can be started.
std::unique_ptr<AsyncIo> make_thread_io(const AsyncIoOptions& options);

}  // namespace tessera

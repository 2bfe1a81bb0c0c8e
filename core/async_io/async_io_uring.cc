#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "core/async_io/async_io.h"
#include "core/files/file_descriptor.h"
#include "core/signals_blocked.h"

namespace tessera {
namespace {

/// Owns an io_uring instance. Its memory is not inherited by a forked child.
class Ring {
 public:
  explicit Ring(int num_entries)
      : open_(::io_uring_queue_init(static_cast<unsigned>(num_entries), &ring_, 0) == 0) {
    if (open_) static_cast<void>(::io_uring_ring_dontfork(&ring_));
  }
  ~Ring() {
    if (open_) ::io_uring_queue_exit(&ring_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  io_uring* get() { return &ring_; }
  bool open() const { return open_; }
  bool supports(std::span<const int> operations) {
    io_uring_probe* const probe = open_ ? ::io_uring_get_probe_ring(&ring_) : nullptr;
    bool all = probe != nullptr;
    for (const int operation : operations) all = all && ::io_uring_opcode_supported(probe, operation) != 0;
    ::io_uring_free_probe(probe);
    return all;
  }

 private:
  io_uring ring_{};
  bool open_;
};

/// The thread that owns the ring: see core/async_io/async_io.h. A piece under way has a slot, whose number
/// the kernel hands back with its result.
class UringIo final : public AsyncIo {
 public:
  explicit UringIo(const AsyncIoOptions& options)
      : AsyncIo(options),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        ring_(options.queue_depth + 1),
        slots_(static_cast<size_t>(options.queue_depth)) {
    for (size_t slot = slots_.size(); slot > 0; --slot) free_slots_.push_back(slot - 1);
  }

  /// False: not possible here.
  bool open() {
    constexpr int kOperations[] = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_POLL_ADD,
                                   IORING_OP_SYNC_FILE_RANGE, IORING_OP_FADVISE};
    if (!wake_ || !ring_.supports(kOperations)) return false;
    const SignalsBlocked blocked;
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
    return true;
  }

  void start(std::span<const IoPiece> pieces) override {
    bool was_empty;
    {
      const std::scoped_lock lock(mutex_);
      was_empty = queued_.empty();
      queued_.insert(queued_.end(), pieces.begin(), pieces.end());
    }
    // If it was not empty, the thread has yet to look at it: it was woken, or waits for a free slot.
    if (was_empty) wake();
  }

 private:
  static constexpr uint64_t kWake = ~uint64_t{0};

  void wake() const {
    const uint64_t one = 1;
    static_cast<void>(!::write(wake_.get(), &one, sizeof one));  // fails only if the count is at its maximum
  }

  void run(const std::stop_token& stop) {
    const std::stop_callback on_stop(stop, [this] { wake(); });
    poll_wake();
    while (true) {
      if (stop.stop_requested()) {
        const std::scoped_lock lock(mutex_);
        queued_.clear();
      }
      fill_slots();
      if (stop.stop_requested() && free_slots_.size() == slots_.size()) return;
      const int result = ::io_uring_submit_and_wait(ring_.get(), 1);
      // EAGAIN, EBUSY, ENOMEM: no memory for more requests now. What was not submitted is the next time.
      if (result < 0 && result != -EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      reap();
    }
  }

  void fill_slots() {
    while (!free_slots_.empty()) {
      const size_t slot = free_slots_.back();
      {
        const std::scoped_lock lock(mutex_);
        if (queued_.empty()) return;
        slots_[slot] = queued_.front();
        queued_.pop_front();
      }
      free_slots_.pop_back();
      go_on(slot);
    }
  }

  void reap() {
    unsigned head, num_seen = 0;
    io_uring_cqe* event;
    io_uring_for_each_cqe(ring_.get(), head, event) {
      ++num_seen;
      if (event->user_data == kWake) {
        uint64_t count;
        static_cast<void>(!::read(wake_.get(), &count, sizeof count));
        poll_wake();
      } else {
        const size_t slot = event->user_data;
        take(slots_[slot], event->res);
        go_on(slot);
      }
    }
    ::io_uring_cq_advance(ring_.get(), num_seen);
  }

  /// EAGAIN: the rest is done by this thread, because asking the ring again at once could go on forever.
  void take(IoPiece& piece, int64_t result) const {
    advance(piece, result);
    if (result == -EAGAIN) run_to_end(piece);
  }

  /// Prepares the next step of the piece, or ends it.
  void go_on(size_t slot) {
    IoPiece& piece = slots_[slot];
    while (piece.step != IoPiece::Step::kDone) {
      const int64_t result = probe(piece);
      if (result == 0) return prepare(piece, slot);
      take(piece, result);
    }
    options_.finished(piece);
    free_slots_.push_back(slot);
  }

  void prepare(const IoPiece& piece, size_t slot) {
    io_uring_sqe* const request = next_request();
    const int file = options_.descriptor;
    const auto left = static_cast<unsigned>(piece.bytes - piece.transferred);
    const auto at = static_cast<uint64_t>(piece.offset + piece.transferred);
    if (piece.step == IoPiece::Step::kWriteBack)
      ::io_uring_prep_sync_file_range(
          request, file, static_cast<unsigned>(piece.bytes), static_cast<uint64_t>(piece.offset),
          SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    else if (piece.step == IoPiece::Step::kDropCache)
      ::io_uring_prep_fadvise(request, file, static_cast<uint64_t>(piece.offset), piece.bytes,
                              POSIX_FADV_DONTNEED);
    else if (piece.is_write)
      ::io_uring_prep_write(request, file, piece.data + piece.transferred, left, at);
    else
      ::io_uring_prep_read(request, file, piece.data + piece.transferred, left, at);
    request->user_data = slot;
  }

  void poll_wake() {
    io_uring_sqe* const request = next_request();
    ::io_uring_prep_poll_add(request, wake_.get(), POLLIN);
    request->user_data = kWake;
  }

  /// Never null: there is an entry for each slot and one for the poll.
  io_uring_sqe* next_request() { return ::io_uring_get_sqe(ring_.get()); }

  std::mutex mutex_;  // for queued_; the rest is the thread's
  std::deque<IoPiece> queued_;
  const FileDescriptor wake_;
  Ring ring_;
  std::vector<IoPiece> slots_;
  std::vector<size_t> free_slots_;
  std::jthread thread_;  // last: ends before what it uses
};

}  // namespace

std::unique_ptr<AsyncIo> make_uring_io(const AsyncIoOptions& options) {
  auto io = std::make_unique<UringIo>(options);
  if (!io->open()) return nullptr;
  return io;
}

}  // namespace tessera

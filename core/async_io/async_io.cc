#include "core/async_io/async_io.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

namespace tessera {
namespace {

// The kernel is short of memory for a request for a moment: a second in all, then the piece fails.
constexpr int kMostBusy = 1000;
constexpr std::chrono::milliseconds kBusyPause(1);

}  // namespace

int64_t AsyncIo::probe(const IoPiece& piece) const {
  if (!options_.probe || piece.step != IoPiece::Step::kTransfer) return 0;
  return -options_.probe(piece.is_write ? "write" : "read", piece.offset + piece.transferred,
                         piece.bytes - piece.transferred);
}

void AsyncIo::advance(IoPiece& piece, int64_t result) const {
  using Step = IoPiece::Step;
  const auto end = [&](int error) {
    piece.error = error;
    piece.step = Step::kDone;
  };
  if (result == -EINTR || (result == -EAGAIN && ++piece.num_busy <= kMostBusy)) return;
  if (piece.step == Step::kDropCache) return end(0);  // a hint
  if (piece.step == Step::kWriteBack) {
    const bool unknown = result == -EINVAL || result == -ENOSYS || result == -EOPNOTSUPP;
    if (result < 0 && !unknown) return end(static_cast<int>(-result));
    piece.step = Step::kDropCache;
    return;
  }
  if (result < 0) return end(static_cast<int>(-result));
  if (options_.direct && piece.transferred + result < piece.bytes) result -= result % options_.alignment;
  if (result == 0) return end(piece.is_write ? ENOSPC : IoPiece::kEndOfFile);
  piece.transferred += result;
  if (piece.transferred < piece.bytes) return;
  piece.step = options_.direct ? Step::kDone : piece.is_write ? Step::kWriteBack : Step::kDropCache;
}

int64_t AsyncIo::perform(const IoPiece& piece) const {
  const auto answer = [](int64_t result) { return result < 0 ? -int64_t{errno} : result; };
  std::byte* const data = piece.data + piece.transferred;
  const auto left = static_cast<size_t>(piece.bytes - piece.transferred);
  switch (piece.step) {
    case IoPiece::Step::kTransfer: {
      const int64_t at = piece.offset + piece.transferred;
      return answer(piece.is_write ? ::pwrite(options_.descriptor, data, left, at)
                                   : ::pread(options_.descriptor, data, left, at));
    }
    case IoPiece::Step::kWriteBack:
      return answer(::sync_file_range(
          options_.descriptor, piece.offset, piece.bytes,
          SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER));
    case IoPiece::Step::kDropCache:
      return -::posix_fadvise(options_.descriptor, piece.offset, piece.bytes, POSIX_FADV_DONTNEED);
    case IoPiece::Step::kDone: break;
  }
  return 0;
}

void AsyncIo::run_to_end(IoPiece& piece) const {
  while (piece.step != IoPiece::Step::kDone) {
    int64_t result = probe(piece);
    if (result == 0) result = perform(piece);
    if (result == -EAGAIN) std::this_thread::sleep_for(kBusyPause);
    advance(piece, result);
  }
}

}  // namespace tessera

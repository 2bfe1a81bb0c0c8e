#include "core/async_io/spill_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/async_io/spill_file_internal.h"
#include "core/check.h"
#include "core/files/file_descriptor.h"
#include "core/signals_blocked.h"
#include "core/str.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// "optimizer state of rank 3 in DIR"
std::string subject(const SpillFileOptions& options) {
  return str(options.purpose.empty() ? "state that is kept on disk" : options.purpose, " in ",
             options.directory);
}

/// ", 1,234 bytes are available there", or "" if that cannot be found out.
std::string available(int file) {
  struct statvfs status{};
  if (::fstatvfs(file, &status) != 0) return "";
  return str(", ", format_count(static_cast<int64_t>(status.f_bavail * status.f_frsize)),
             " bytes are available there");
}

[[noreturn]] void throw_error(const std::string& what, const SpillFileOptions& options, int error,
                              const std::string& advice) {
  const std::string reason = describe_errno(error);
  throw DiskError(str("cannot ", what, " ", subject(options), ": ", reason, advice, " (", options.key, ")"),
                  DiskError::Reason{reason});
}

void check(const SpillFileOptions& options) {
  TESSERA_CHECK(options.bytes >= 0, options.bytes);
  TESSERA_CHECK(options.num_threads >= 1 && options.num_threads <= 256, options.num_threads);
  TESSERA_CHECK(options.piece_bytes > 0 && options.piece_bytes % SpillFile::kAlignment == 0 &&
                    options.piece_bytes <= static_cast<int64_t>(kLargestCall),
                options.piece_bytes);
  if (options.directory.empty())
    throw DiskError("no directory is given for ", options.purpose, "; expected one on a local disk (",
                    options.key, ")");
}

/// A file without a name (O_TMPFILE), or one whose name is removed at once, where the file system has no
/// such.
FileDescriptor open_nameless(const std::string& directory) {
  int opened = TEMP_FAILURE_RETRY(::open(directory.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  // EISDIR, ENOENT: answers of kernels that do not know O_TMPFILE; then mkostemp says what is wrong.
  if (opened < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT || errno == EINVAL)) {
    std::string name = (fs::path(directory) / "tessera_spill_XXXXXX").string();
    opened = ::mkostemp(name.data(), O_CLOEXEC);
    if (opened >= 0 && ::unlink(name.c_str()) != 0) {
      const int error = errno;
      ::close(opened);
      opened = -1;
      errno = error;
    }
  }
  return FileDescriptor(opened);
}

FileDescriptor make_file(const SpillFileOptions& options) {
  constexpr const char* kAdvice = "; choose a directory that this process may write to";
  std::error_code error;
  fs::create_directories(options.directory, error);
  if (error) throw_error("make the directory for", options, error.value(), kAdvice);
  FileDescriptor file = open_nameless(options.directory);
  if (const int reason = errno; !file) throw_error("create a file for", options, reason, kAdvice);
  return file;
}

/// 0 or errno.
int allocate(int file, int64_t bytes) {
  rlimit limit{};
  // Asked before, because the kernel answers with SIGXFSZ too.
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && static_cast<rlim_t>(bytes) > limit.rlim_cur) return EFBIG;
  // Asked before too, because fallocate takes all that is there before it fails: other processes would find
  // the disk full. No blocks at all: the file system does not tell.
  struct statvfs status{};
  if (::fstatvfs(file, &status) != 0) return errno;
  if (status.f_blocks > 0 && static_cast<uint64_t>(bytes) / status.f_frsize > status.f_bavail) return ENOSPC;
  // Not posix_fallocate: where the file system cannot reserve, glibc writes a byte to each block.
  while (::fallocate(file, 0, 0, bytes) != 0) {
    if (errno == EINTR) continue;
    if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
    return ::ftruncate(file, bytes) == 0 ? 0 : errno;
  }
  return 0;
}

/// The blocks of the file are its own from here on, where the file system can do that.
void reserve(int file, int64_t bytes, const SpillFileOptions& options) {
  const std::string available_bytes = available(file);  // before it is filled in part
  const SpillFileProbe& probe = ScopedSpillFileProbe::current();
  int error = probe ? probe("reserve", 0, bytes) : 0;
  if (error == 0 && bytes > 0) error = allocate(file, bytes);
  if (error != 0)
    throw_error(str("reserve ", format_count(bytes), " bytes for"), options, error,
                str(available_bytes, "; choose a directory with more room"));
}

/// Whether O_DIRECT is set and works. Some file systems accept it and refuse the reads.
bool make_direct(int file) {
  const int flags = ::fcntl(file, F_GETFL);
  if (flags < 0 || ::fcntl(file, F_SETFL, flags | O_DIRECT) != 0) return false;
  alignas(SpillFile::kAlignment) std::byte block[SpillFile::kAlignment];
  if (TEMP_FAILURE_RETRY(::pread(file, block, sizeof block, 0)) >= 0 || errno != EINVAL) return true;
  static_cast<void>(::fcntl(file, F_SETFL, flags));
  return false;
}

/// In place of an errno value.
constexpr int kEndOfFile = -1;
// The kernel is short of memory for a request for a moment: a second in all, then the piece fails.
constexpr int kMostBusy = 1000;
constexpr std::chrono::milliseconds kBusyPause(1);

}  // namespace

/// What a forked child leaves alone.
class SpillFile::State {
 public:
  explicit State(const SpillFileOptions& options) : options_(options), file_(make_file(options_)) {
    size_ = rounded_up(options_.bytes);
    reserve(file_.get(), size_, options_);
    direct_ = options_.direct && size_ > 0 && make_direct(file_.get());
    // No readahead: it fills the page cache with folios that reach over the end of a piece, and those are not
    // dropped with it.
    if (!direct_) static_cast<void>(::posix_fadvise(file_.get(), 0, 0, POSIX_FADV_RANDOM));
    start_threads();
  }
  ~State() {
    for (std::jthread& thread : threads_) thread.request_stop();  // all at once, then each is joined
  }

  Transfer start(bool is_write, int64_t offset, std::byte* data, int64_t bytes);
  bool done(Transfer transfer) const;
  void wait(Transfer transfer);

 private:
  friend class SpillFile;

  struct UnderWay {
    bool is_write;
    int64_t offset, bytes, num_pieces;
    int error = 0;  // of the piece that failed first
  };
  struct Piece {
    Transfer transfer;
    bool is_write;
    int64_t offset;  ///< in the file
    std::byte* data;
    int64_t bytes;
  };

  void start_threads();
  void work(const std::stop_token& stop);
  /// Each returns 0, an errno value or kEndOfFile.
  int transfer(const Piece& piece) const;
  int leave_cache(const Piece& piece) const;
  void end(const Piece& piece, int error);
  std::string describe(const UnderWay& transfer) const;
  void check_process() const {
    TESSERA_CHECK(::getpid() == process_, "a SpillFile cannot be used in a forked child");
  }

  const SpillFileOptions options_;
  const pid_t process_ = ::getpid();
  FileDescriptor file_;
  int64_t size_ = 0;
  bool direct_ = false;
  const SpillFileProbe probe_ = ScopedSpillFileProbe::current();

  mutable std::mutex mutex_;  // for all below but threads_
  std::condition_variable ended_;
  std::condition_variable_any queued_;
  std::deque<Piece> queue_;
  Transfer last_ = 0;
  std::unordered_map<Transfer, UnderWay> under_way_;
  std::unordered_map<Transfer, DiskError> failed_;
  int64_t bytes_read_ = 0, bytes_written_ = 0;

  std::vector<std::jthread> threads_;  // last: they end before what they use
};

void SpillFile::State::start_threads() {
  const SignalsBlocked blocked;
  try {
    for (int i = 0; i < options_.num_threads; ++i)
      threads_.emplace_back([this](const std::stop_token& stop) { work(stop); });
  } catch (const std::system_error& error) {
    throw DiskError("cannot start a thread for ", subject(options_), ": ", error.code().message());
  }
}

/// A piece at a time, in the order of the queue.
void SpillFile::State::work(const std::stop_token& stop) {
  while (true) {
    std::unique_lock lock(mutex_);
    queued_.wait(lock, stop, [&] { return !queue_.empty(); });
    if (stop.stop_requested()) return;
    const Piece piece = queue_.front();
    queue_.pop_front();
    lock.unlock();
    int error = transfer(piece);
    if (error == 0 && !direct_) error = leave_cache(piece);
    end(piece, error);
  }
}

int SpillFile::State::transfer(const Piece& piece) const {
  int num_busy = 0;
  for (int64_t done = 0; done < piece.bytes;) {
    const int64_t at = piece.offset + done, left = piece.bytes - done;
    int64_t moved = 0;
    int error = probe_ ? probe_(piece.is_write ? "write" : "read", at, left) : 0;
    if (error == 0) {
      std::byte* const data = piece.data + done;
      const auto size = static_cast<size_t>(left);
      moved = piece.is_write ? ::pwrite(file_.get(), data, size, at) : ::pread(file_.get(), data, size, at);
      if (moved < 0) error = errno;
    }
    if (error == EINTR) continue;
    if (error == EAGAIN && ++num_busy <= kMostBusy) {
      std::this_thread::sleep_for(kBusyPause);
      continue;
    }
    if (error != 0) return error;
    if (direct_ && moved < left) moved -= moved % kAlignment;  // direct I/O continues at its multiples
    if (moved == 0) return piece.is_write ? ENOSPC : kEndOfFile;
    done += moved;
  }
  return 0;
}

/// The page cache would grow by all that is read and written. The kernel only drops clean pages, so what was
/// written goes to the disk first.
int SpillFile::State::leave_cache(const Piece& piece) const {
  constexpr unsigned kAll = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  while (piece.is_write && ::sync_file_range(file_.get(), piece.offset, piece.bytes, kAll) != 0) {
    if (errno == EINTR) continue;
    const bool is_unknown = errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP;
    if (!is_unknown) return errno;
    break;
  }
  static_cast<void>(::posix_fadvise(file_.get(), piece.offset, piece.bytes, POSIX_FADV_DONTNEED));
  return 0;
}

SpillFile::Transfer SpillFile::State::start(bool is_write, int64_t offset, std::byte* data, int64_t bytes) {
  check_process();
  TESSERA_CHECK(offset % kAlignment == 0 && bytes % kAlignment == 0 &&
                    reinterpret_cast<uintptr_t>(data) % kAlignment == 0,
                "offset ", offset, ", ", bytes, " bytes, address ", data);
  TESSERA_CHECK(offset >= 0 && bytes <= size_ && offset <= size_ - bytes, "bytes ", offset, " to ",
                offset + bytes, " of ", size_);
  if (bytes == 0) return 0;
  const int64_t num_pieces = (bytes + options_.piece_bytes - 1) / options_.piece_bytes;
  const std::scoped_lock lock(mutex_);
  ++last_;
  under_way_.emplace(
      last_, UnderWay{.is_write = is_write, .offset = offset, .bytes = bytes, .num_pieces = num_pieces});
  for (int64_t at = 0; at < bytes; at += options_.piece_bytes)
    queue_.push_back({last_, is_write, offset + at, data + at, std::min(options_.piece_bytes, bytes - at)});
  if (num_pieces == 1)
    queued_.notify_one();
  else
    queued_.notify_all();
  return last_;
}

void SpillFile::State::end(const Piece& piece, int error) {
  const std::scoped_lock lock(mutex_);
  const auto found = under_way_.find(piece.transfer);
  UnderWay& transfer = found->second;
  if (transfer.error == 0) transfer.error = error;
  if (--transfer.num_pieces > 0) return;
  if (transfer.error != 0)
    failed_.emplace(piece.transfer, DiskError(describe(transfer)));
  else
    (transfer.is_write ? bytes_written_ : bytes_read_) += transfer.bytes;
  under_way_.erase(found);
  ended_.notify_all();
}

std::string SpillFile::State::describe(const UnderWay& transfer) const {
  const std::string reason = transfer.error == kEndOfFile ? "the file ends there: another process has cut it"
                                                          : describe_errno(transfer.error);
  return str("cannot ", transfer.is_write ? "write " : "read ", format_count(transfer.bytes),
             " bytes at byte ", format_count(transfer.offset), " of ", subject(options_), ": ", reason,
             "; check that disk, or choose another directory (", options_.key, ")");
}

bool SpillFile::State::done(Transfer transfer) const {
  check_process();
  const std::scoped_lock lock(mutex_);
  TESSERA_CHECK(transfer >= 0 && transfer <= last_, "no transfer ", transfer);
  return !under_way_.contains(transfer);
}

void SpillFile::State::wait(Transfer transfer) {
  check_process();
  std::unique_lock lock(mutex_);
  TESSERA_CHECK(transfer >= 0 && transfer <= last_, "no transfer ", transfer);
  ended_.wait(lock, [&] { return !under_way_.contains(transfer); });
  if (const auto failed = failed_.find(transfer); failed != failed_.end()) throw DiskError(failed->second);
}

// -------------------------------------------------------------------------------------------- SpillFile

SpillFile::SpillFile(const SpillFileOptions& options) {
  check(options);
  state_ = std::make_unique<State>(options);
}

SpillFile::~SpillFile() {
  if (::getpid() == state_->process_) return;
  state_->file_.reset();
  // Left as it is: its threads are the parent's, and its locks may be held by them.
  [[maybe_unused]] State* const left = state_.release();
}

SpillFile::Transfer SpillFile::read(int64_t offset, std::span<std::byte> into) {
  return state_->start(false, offset, into.data(), static_cast<int64_t>(into.size()));
}

SpillFile::Transfer SpillFile::write(int64_t offset, std::span<const std::byte> from) {
  // A write does not change the bytes: both kinds share Piece.
  return state_->start(true, offset, const_cast<std::byte*>(from.data()), static_cast<int64_t>(from.size()));
}

bool SpillFile::done(Transfer transfer) const { return state_->done(transfer); }
void SpillFile::wait(Transfer transfer) { state_->wait(transfer); }

int64_t SpillFile::bytes_read() const {
  const std::scoped_lock lock(state_->mutex_);
  return state_->bytes_read_;
}
int64_t SpillFile::bytes_written() const {
  const std::scoped_lock lock(state_->mutex_);
  return state_->bytes_written_;
}
bool SpillFile::direct() const { return state_->direct_; }

}  // namespace tessera

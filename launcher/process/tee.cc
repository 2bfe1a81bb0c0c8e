#include "launcher/process/tee.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>
#include <map>
#include <string_view>
#include <utility>

#include "core/files/file_descriptor.h"
#include "core/signals_blocked.h"
#include "core/str.h"

namespace tessera::launcher {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kInterval{50};
/// An output that has taken nothing for this long at the end is given up.
constexpr std::chrono::seconds kLastChance{2};
/// No more text waits in memory for an output; the rest stays in its file.
constexpr size_t kMostWaiting = 1 << 20;

/// Writes to a file descriptor of this process without waiting for a reader.
class Output {
 public:
  explicit Output(int fd) : fd_(fd) {
    struct stat file{};
    if (::fstat(fd, &file) != 0) return;
    is_socket_ = S_ISSOCK(file.st_mode);
    // O_NONBLOCK belongs to what other processes have inherited, too. A pipe or a terminal that is opened
    // anew has flags of its own.
    if (S_ISFIFO(file.st_mode) || ::isatty(fd) != 0)
      own_ = FileDescriptor(
          ::open(str("/proc/self/fd/", fd).c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
    if (own_) fd_ = own_.get();
  }

  bool takes_more() const { return waiting_.size() < kMostWaiting; }
  bool is_done() const { return waiting_.empty(); }
  void add(std::string_view text) {
    if (!is_gone_) waiting_ += text;
  }

  /// Writes what is taken now; whether anything was.
  bool advance() {
    size_t written = 0;
    while (written < waiting_.size()) {
      const char* const rest = waiting_.data() + written;
      const size_t size = waiting_.size() - written;
      const ssize_t n =
          is_socket_ ? ::send(fd_, rest, size, MSG_DONTWAIT | MSG_NOSIGNAL) : ::write(fd_, rest, size);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) break;
      is_gone_ = n <= 0;  // errors of the output do not concern the ranks
      if (n < 0 && errno != EPIPE && errno != ECONNRESET && errno != EIO) error_ = errno;
      written = is_gone_ ? waiting_.size() : written + static_cast<size_t>(n);
    }
    waiting_.erase(0, written);
    return written > 0;
  }

  /// The errno, once, of an output that has failed while it has a reader: a full disk.
  int take_error() { return std::exchange(error_, 0); }

  /// Waits until it takes more, if there is more.
  void wait(std::chrono::milliseconds limit) const {
    pollfd polled{is_done() ? -1 : fd_, POLLOUT, 0};
    ::poll(&polled, 1, static_cast<int>(limit.count()));
  }

 private:
  int fd_;
  FileDescriptor own_;
  bool is_socket_ = false;
  bool is_gone_ = false;
  int error_ = 0;
  std::string waiting_;
};

/// One file, read as it grows.
class Follower {
 public:
  Follower(ShownFile file, Output& output) : shown_(std::move(file)), output_(output) {}

  /// Passes on the complete lines that have come, or without a prefix all that has come. Returns whether
  /// anything was read.
  bool advance() {
    if (!file_) file_ = FileDescriptor(::open(shown_.path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file_) return false;
    char buffer[65536];
    bool has_read = false;
    for (ssize_t n = 0; output_.takes_more() && (n = ::read(file_.get(), buffer, sizeof(buffer))) > 0;) {
      has_read = true;
      if (shown_.prefix.empty()) {
        output_.add({buffer, static_cast<size_t>(n)});
        continue;
      }
      text_.append(buffer, static_cast<size_t>(n));
      const size_t end = text_.find_last_of("\n\r");
      if (end == text_.npos) continue;
      add_lines(std::string_view(text_).substr(0, end + 1));
      text_.erase(0, end + 1);
    }
    return has_read;
  }

  /// Passes on the last line, which may have no end.
  void finish() {
    if (!text_.empty()) add_lines(text_ + "\n");
    text_.clear();
  }

 private:
  void add_lines(std::string_view lines) {
    while (!lines.empty()) {
      const size_t end = lines.find_first_of("\n\r");  // a progress bar's redraws are lines of their own
      if (end > 0) output_.add(str(shown_.prefix, lines.substr(0, end), "\n"));
      lines.remove_prefix(end + 1);
    }
  }

  const ShownFile shown_;
  Output& output_;
  FileDescriptor file_;
  std::string text_;
};

void follow(const std::stop_token& stop, const std::vector<ShownFile>& files,
            const std::function<void(int)>& on_error) {
  std::map<int, Output> outputs;  // by descriptor: lines of several files stay whole
  std::vector<Follower> followers;
  for (const ShownFile& file : files)
    followers.emplace_back(file, outputs.try_emplace(file.output_fd, file.output_fd).first->second);
  const auto advance = [&] {
    bool any = false;
    for (Follower& follower : followers) any |= follower.advance();
    for (auto& [fd, output] : outputs) {
      any |= output.advance();
      if (const int error = output.take_error(); error != 0 && on_error) on_error(error);
    }
    return any;
  };
  const auto is_done = [&] {
    return std::all_of(outputs.begin(), outputs.end(), [](const auto& one) { return one.second.is_done(); });
  };
  const auto pause = [&] {
    if (is_done()) return std::this_thread::sleep_for(kInterval);
    for (auto& [fd, output] : outputs) output.wait(kInterval / static_cast<int>(outputs.size()));
  };
  while (!stop.stop_requested())
    if (!advance()) pause();
  const auto drain = [&] {  // false: an output takes nothing
    for (auto deadline = Clock::now() + kLastChance; Clock::now() < deadline;) {
      if (advance())
        deadline = Clock::now() + kLastChance;
      else if (is_done())
        return true;
      else
        pause();
    }
    return false;
  };
  if (!drain()) return;
  for (Follower& follower : followers) follower.finish();
  drain();
}

}  // namespace

Tee::Tee(std::vector<ShownFile> files, std::function<void(int)> on_error) {
  if (files.empty()) return;
  const SignalsBlocked blocked;
  thread_ = std::jthread([files = std::move(files), on_error = std::move(on_error)](
                             const std::stop_token& stop) { follow(stop, files, on_error); });
}

}  // namespace tessera::launcher

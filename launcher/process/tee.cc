#include "launcher/process/tee.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <string_view>
#include <utility>

#include "core/files/file_descriptor.h"
#include "core/str.h"

namespace tessera::launcher {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(50);

/// One file, read as it grows.
class Follower {
 public:
  Follower(RankLog log, int output_fd)
      : log_(std::move(log)), prefix_(str("[rank ", log_.rank, "] ")), output_fd_(output_fd) {}

  /// Shows the complete lines that have come.
  void advance() {
    if (!file_) file_ = FileDescriptor(::open(log_.path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file_) return;
    char buffer[65536];
    for (ssize_t n = 0; (n = ::read(file_.get(), buffer, sizeof(buffer))) > 0;) {
      text_.append(buffer, static_cast<size_t>(n));
      const size_t end = text_.find_last_of("\n\r");
      if (end == text_.npos) continue;
      show(std::string_view(text_).substr(0, end + 1));
      text_.erase(0, end + 1);
    }
  }

  /// Shows the last line, which may have no end.
  void finish() {
    advance();
    if (!text_.empty()) show(text_ + "\n");
  }

 private:
  void show(std::string_view lines) {
    std::string out;
    while (!lines.empty()) {
      const size_t end = lines.find_first_of("\n\r");  // a progress bar's redraws are lines of their own
      if (end > 0) out += str(prefix_, lines.substr(0, end), "\n");
      lines.remove_prefix(end + 1);
    }
    for (std::string_view left = out; !left.empty();) {
      const ssize_t n = ::write(output_fd_, left.data(), left.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return;
      left.remove_prefix(static_cast<size_t>(n));
    }
  }

  RankLog log_;
  std::string prefix_, text_;
  FileDescriptor file_;
  int output_fd_;
};

void follow(const std::stop_token& stop, const std::vector<RankLog>& logs, int output_fd) {
  std::vector<Follower> followers;
  for (const RankLog& log : logs) followers.emplace_back(log, output_fd);
  while (!stop.stop_requested()) {
    for (Follower& follower : followers) follower.advance();
    std::this_thread::sleep_for(kInterval);
  }
  for (Follower& follower : followers) follower.finish();
}

}  // namespace

Tee::Tee(std::vector<RankLog> logs, int output_fd) {
  if (logs.empty()) return;
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);  // the thread inherits it
  thread_ = std::jthread(
      [logs = std::move(logs), output_fd](const std::stop_token& stop) { follow(stop, logs, output_fd); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace tessera::launcher

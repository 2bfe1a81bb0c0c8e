#include "launcher/process/output_relay.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/files/disk_error.h"

namespace tessera::launcher {
namespace {

constexpr int kPollMs = 50;

struct Source {
  FileDescriptor pipe;
  int target = -1;
};

/// Copies what is there. Errors of the target are ignored: the rank goes on.
void copy(const Source& source) {
  char buffer[16384];
  for (;;) {
    const ssize_t n = ::read(source.pipe.get(), buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    for (ssize_t sent = 0; sent < n;) {
      const ssize_t more = ::write(source.target, buffer + sent, static_cast<size_t>(n - sent));
      if (more < 0 && errno == EINTR) continue;
      if (more <= 0) break;
      sent += more;
    }
  }
}

void copy_all(const std::stop_token& stop, const std::array<Source, 2>& sources) {
  for (bool is_last = false; !is_last;) {
    is_last = stop.stop_requested();  // before the read: what was written until then is read
    pollfd polled[] = {{sources[0].pipe.get(), POLLIN, 0}, {sources[1].pipe.get(), POLLIN, 0}};
    ::poll(polled, 2, is_last ? 0 : kPollMs);
    for (const Source& source : sources) copy(source);
  }
}

/// The read end does not block.
std::pair<FileDescriptor, FileDescriptor> make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw CommError("no pipe could be made for the output of rank 0: ", describe_errno(errno));
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

}  // namespace

OutputRelay::OutputRelay(bool active) {
  if (!active) return;
  std::array<Source, 2> sources;
  std::tie(sources[0].pipe, out_) = make_pipe();
  std::tie(sources[1].pipe, err_) = make_pipe();
  sources[0].target = STDOUT_FILENO;
  sources[1].target = STDERR_FILENO;
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);  // the thread inherits it
  thread_ =
      std::jthread([sources = std::move(sources)](const std::stop_token& stop) { copy_all(stop, sources); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace tessera::launcher

#include "launcher/remote_folders.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <optional>

#include "core/files/file_descriptor.h"
#include "core/random_digits.h"
#include "core/str.h"

namespace tessera::launcher {

struct RemoteFolders::Keeper {
  std::optional<Process> ssh;
  FileDescriptor socket;  // its input and output
};

namespace {

/// The `cat` on the host sends back what it is sent.
bool answers(const FileDescriptor& socket) {
  constexpr int kPatienceMs = 5000;
  char bytes[256];
  while (::recv(socket.get(), bytes, sizeof(bytes), MSG_DONTWAIT) > 0) {  // of before
  }
  pollfd answer{.fd = socket.get(), .events = POLLIN, .revents = 0};
  return ::send(socket.get(), "\n", 1, MSG_NOSIGNAL) == 1 && ::poll(&answer, 1, kPatienceMs) == 1 &&
         ::recv(socket.get(), bytes, sizeof(bytes), MSG_DONTWAIT) > 0;
}

}  // namespace

RemoteFolders::RemoteFolders(const ClusterOptions& options, const sigset_t& mask)
    : options_(options), mask_(mask) {
  if (options.engine != Engine::kSsh || options.restarts.max_restarts == 0) return;
  paths_.resize(options.hosts.size());
  keepers_.resize(options.hosts.size());
}

RemoteFolders::~RemoteFolders() {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  for (Keeper& keeper : keepers_) keeper.socket.reset();
  for (Keeper& keeper : keepers_)
    while (keeper.ssh && !keeper.ssh->has_ended() && std::chrono::steady_clock::now() < give_up)
      ::usleep(5000);
}

// A rank that is saving when the run ends may be making a file: so the folder must stay away.
EngineCommand RemoteFolders::command_for(size_t host) const {
  const std::string& path = paths_[host];
  return ssh_command(
      options_, options_.hosts[host].target(),
      str("trap '' HUP INT TERM; mkdir -m 700 ", path, " || exit; cat; ",
          "for i in 1 2 3 4 5 6 7 8 9; do rm -rf ", path, "; sleep 0.2; [ -e ", path, " ] || exit 0; done"));
}

void RemoteFolders::check(size_t host) {
  if (host < keepers_.size() && !answers(keepers_[host].socket)) keepers_[host] = {};
}

// A new name each time: what an earlier ssh has left on the host may be about to be removed there.
const std::vector<std::string>& RemoteFolders::make() {
  for (size_t host = 0; host < keepers_.size(); ++host) {
    Keeper& keeper = keepers_[host];
    if (keeper.ssh && !keeper.ssh->has_ended()) continue;
    paths_[host] = str("/dev/shm/tessera_memory_", random_digits(16), "_", host);
    int sockets[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) continue;
    keeper.socket = FileDescriptor(sockets[0]);
    const FileDescriptor theirs(sockets[1]), null(::open("/dev/null", O_WRONLY | O_CLOEXEC));
    const EngineCommand command = command_for(host);
    SpawnOptions spawn;
    spawn.program = command.program;
    spawn.args = command.args;
    for (char** entry = environ; *entry; ++entry) spawn.environment.emplace_back(*entry);
    spawn.signal_mask = mask_;
    spawn.stdin_fd = spawn.stdout_fd = theirs.get();
    spawn.stderr_fd = null.get();  // an ssh that fails says so for the launcher on the host
    keeper.ssh.emplace(Process::spawn(spawn));
    ::send(keeper.socket.get(), command.input.data(), command.input.size(), MSG_NOSIGNAL);
  }
  return paths_;
}

}  // namespace tessera::launcher

#include "tests/comm/comm_testing.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <random>
#include <set>
#include <stdexcept>

#include "core/files/file_descriptor.h"
#include "core/str.h"
#include "tests/comm/rank_server.h"

namespace tessera::comm::testing {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

namespace {

/// The messages of a server of ranks (rank_server.h).
class RankServer {
 public:
  RankServer() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
      throw std::runtime_error("socketpair");
    socket_ = FileDescriptor(ends[0]);
    const FileDescriptor theirs(ends[1]);
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // ranks become children of this process
    std::string program = rank_program(), serve = "serve";
    char* const argv[] = {program.data(), serve.data(), nullptr};
    ::setenv("OMP_NUM_THREADS", "1", 1);  // libgomp reads it once
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, theirs.get(), kServerSocket);
    pid_t pid = -1;
    const int error = posix_spawn(&pid, program.c_str(), &actions, nullptr, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error != 0) throw std::runtime_error("posix_spawn of " + program);
  }

  int start(const RankRequest& request, int output) {
    send_request(socket_.get(), request, output);
    int pid = -1;
    char has_ended = 0;  // the process between the server and the rank
    if (::recv(socket_.get(), &pid, sizeof pid, 0) != sizeof pid ||
        ::recv(socket_.get(), &has_ended, 1, 0) != 1)
      throw std::runtime_error("the server of ranks has ended");
    return pid;
  }

 private:
  FileDescriptor socket_;
};

}  // namespace

std::string rank_program() {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "comm_test_rank").string();
}

RankProcess::RankProcess(const std::vector<std::string>& arguments, const Variables& variables) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  pipe_ = ends[0];
  RankRequest request{arguments, variables};
  for (const char* name : {"PATH", "LD_LIBRARY_PATH", "ASAN_OPTIONS", "UBSAN_OPTIONS", "LSAN_OPTIONS"})
    if (const char* value = std::getenv(name)) request.variables.emplace(name, value);
  static RankServer server;
  pid_ = server.start(request, ends[1]);
  ::close(ends[1]);
}

RankProcess::~RankProcess() {
  if (status_ < 0) {
    ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(pid_, &status, 0);
  }
  ::close(pipe_);
}

bool RankProcess::read_until(const std::function<bool()>& is_enough) {
  const auto deadline = Clock::now() + kPatience;
  while (!is_enough()) {
    pollfd ready{pipe_, POLLIN, 0};
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    if (left.count() <= 0 || ::poll(&ready, 1, static_cast<int>(left.count())) <= 0) return false;
    char buffer[4096];
    const ssize_t count = ::read(pipe_, buffer, sizeof buffer);
    if (count <= 0) return false;
    output_.append(buffer, static_cast<size_t>(count));
  }
  return true;
}

bool RankProcess::await_output(const std::string& text) {
  return read_until([&] { return output_.find(text) != output_.npos; });
}

void RankProcess::kill(int signal) { ::kill(pid_, signal); }

int RankProcess::wait() {
  read_until([] { return false; });
  pollfd end{pipe_, POLLIN, 0};
  if (status_ < 0 && ::poll(&end, 1, 0) == 0) {
    output_ += str("\n(it still ran after ", kPatience.count(), " s)\n");
    kill(SIGKILL);
  }
  if (status_ < 0) ::waitpid(pid_, &status_, 0);
  return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
}

Variables rank_variables(int rank, int world_size, int port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(world_size)},
          {"LOCAL_RANK", std::to_string(rank)},
          {"LOCAL_WORLD_SIZE", std::to_string(world_size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)},
          {"OMP_NUM_THREADS", "1"}};
}

/// Below the kernel's range for connections (32768 and up): no connection of another test takes it before its
/// server is there.
static int any_free_port() {
  std::random_device random;
  for (int attempt = 0; attempt < 100; ++attempt) {
    const int port = std::uniform_int_distribution<int>(15000, 32000)(random);
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    const bool is_free = ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    ::close(fd);
    if (is_free) return port;
  }
  throw std::runtime_error("no free port");
}

int free_port() {
  static std::set<int> given;  // several groups may start at once
  int port = any_free_port();
  while (!given.insert(port).second) port = any_free_port();
  return port;
}

Processes start(const std::string& scenario, int world_size, const Variables& extra,
                const std::string& what) {
  const int port = free_port();
  Processes processes;
  for (int rank = 0; rank < world_size; ++rank) {
    Variables variables = rank_variables(rank, world_size, port);
    for (const auto& [name, value] : extra) variables[name] = value;
    processes.push_back(std::make_unique<RankProcess>(std::vector<std::string>{scenario, what}, variables));
  }
  return processes;
}

}  // namespace tessera::comm::testing

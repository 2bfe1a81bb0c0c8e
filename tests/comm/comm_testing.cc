#include "tests/comm/comm_testing.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <random>
#include <set>
#include <stdexcept>

namespace tessera::comm::testing {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

RankProcess::RankProcess(const std::vector<std::string>& arguments, const Variables& variables,
                         int inherit_fd) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  pipe_ = ends[0];
  std::vector<std::string> words{
      (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "comm_test_rank").string()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<std::string> settings;
  for (const auto& [name, value] : variables) settings.push_back(name + "=" + value);
  for (const char* name : {"PATH", "LD_LIBRARY_PATH", "ASAN_OPTIONS", "UBSAN_OPTIONS", "LSAN_OPTIONS"}) {
    if (const char* value = std::getenv(name)) settings.push_back(std::string(name) + "=" + value);
  }
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::vector<char*> envp;
  for (std::string& setting : settings) envp.push_back(setting.data());
  envp.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  if (inherit_fd >= 0)
    posix_spawn_file_actions_adddup2(&actions, inherit_fd, inherit_fd);  // clears close-on-exec
  const int error = posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), envp.data());
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  if (error != 0) throw std::runtime_error("posix_spawn of " + words[0]);
}

RankProcess::~RankProcess() {
  if (status_ < 0) {
    ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(pid_, &status, 0);
  }
  ::close(pipe_);
}

bool RankProcess::read_some(milliseconds timeout) {
  pollfd ready{pipe_, POLLIN, 0};
  if (::poll(&ready, 1, static_cast<int>(timeout.count())) <= 0) return false;
  char buffer[4096];
  const ssize_t count = ::read(pipe_, buffer, sizeof buffer);
  if (count <= 0) return false;
  output_.append(buffer, static_cast<size_t>(count));
  return true;
}

bool RankProcess::await_output(const std::string& text) {
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  while (output_.find(text) == output_.npos) {
    if (Clock::now() > deadline || !read_some(std::chrono::seconds(30))) return false;
  }
  return true;
}

void RankProcess::kill(int signal) { ::kill(pid_, signal); }

int RankProcess::wait() {
  while (read_some(std::chrono::seconds(60))) {
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

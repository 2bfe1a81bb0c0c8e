#include "tests/comm/rank_server.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace tessera::comm::testing {
namespace {

constexpr size_t kMostBytes = 16 << 10;

/// Room for the control message with the descriptor.
using Control = std::array<char, CMSG_SPACE(sizeof(int))>;

/// Each string with its NUL: how many arguments, they, and the variables.
std::string encode(const RankRequest& request) {
  std::string text = std::to_string(request.arguments.size()) + '\0';
  for (const std::string& argument : request.arguments) text += argument + '\0';
  for (const auto& [name, value] : request.variables) text += name + "=" + value + '\0';
  return text;
}

/// Sets the environment, and gives the arguments.
RankRequest take(const std::string& text) {
  std::vector<std::string> words;
  for (size_t at = 0; at < text.size(); at += words.back().size() + 1) words.emplace_back(text.c_str() + at);
  RankRequest request;
  const auto first = words.begin() + 1, end = first + std::stoi(words.at(0));
  request.arguments.assign(first, end);
  ::clearenv();
  for (auto word = end; word != words.end(); ++word)
    ::setenv(word->substr(0, word->find('=')).c_str(), word->c_str() + word->find('=') + 1, 1);
  return request;
}

void become_rank(int output) {
  ::close(kServerSocket);
  ::dup2(output, STDOUT_FILENO);
  ::dup2(output, STDERR_FILENO);
  ::close(output);
}

}  // namespace

void send_request(int socket, const RankRequest& request, int output) {
  std::string text = encode(request);
  iovec data{text.data(), text.size()};
  alignas(cmsghdr) Control control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(sizeof output);
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof output);
  std::memcpy(CMSG_DATA(header), &output, sizeof output);
  if (text.size() > kMostBytes || ::sendmsg(socket, &message, MSG_NOSIGNAL) < 0)
    throw std::runtime_error("the server of ranks takes no request");
}

std::vector<std::string> serve_ranks() {
  std::string text(kMostBytes, '\0');
  for (;;) {
    iovec data{text.data(), text.size()};
    alignas(cmsghdr) Control control{};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t length = ::recvmsg(kServerSocket, &message, 0);
    if (length <= 0) std::exit(0);
    const cmsghdr* const header = CMSG_FIRSTHDR(&message);
    int output = -1;
    std::memcpy(&output, CMSG_DATA(header), sizeof output);
    const pid_t between = ::fork();
    if (between == 0) {
      const pid_t rank = ::fork();
      if (rank == 0) {
        const RankRequest request = take(text.substr(0, static_cast<size_t>(length)));
        become_rank(output);
        return request.arguments;
      }
      ::_exit(::send(kServerSocket, &rank, sizeof rank, MSG_NOSIGNAL) == sizeof rank ? 0 : 1);
    }
    ::waitpid(between, nullptr, 0);
    ::send(kServerSocket, "", 1, MSG_NOSIGNAL);
    ::close(output);
  }
}

}  // namespace tessera::comm::testing

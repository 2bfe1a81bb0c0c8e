#include "launcher/failure/agent_output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "core/signals_blocked.h"

namespace tessera::launcher {
namespace {

constexpr int kPollMs = 50;

}  // namespace

AgentOutput::AgentOutput(std::vector<FileDescriptor> pipes) {
  for (FileDescriptor& pipe : pipes) {
    ::fcntl(pipe.get(), F_SETFL, O_NONBLOCK);
    sources_.push_back({std::move(pipe), ""});
  }
  const SignalsBlocked blocked;
  thread_ = std::jthread([this](const std::stop_token& stop) { read_all(stop); });
}

std::vector<FailureReport> AgentOutput::finish() {
  thread_.request_stop();
  thread_.join();
  return std::move(reports_);
}

bool AgentOutput::has_report() {
  const std::lock_guard lock(mutex_);
  return !reports_.empty();
}

void AgentOutput::read_all(const std::stop_token& stop) {
  while (!sources_.empty()) {
    const bool is_last = stop.stop_requested();  // before the read: what was written until then is read
    std::vector<pollfd> polled;
    for (const Source& source : sources_) polled.push_back({source.pipe.get(), POLLIN, 0});
    ::poll(polled.data(), polled.size(), is_last ? 0 : kPollMs);
    std::erase_if(sources_, [&](Source& source) { return !advance(source); });
    if (is_last) break;
  }
  for (Source& source : sources_)
    if (!source.text.empty()) take_line(source.text);
}

/// Reads what is there. False at the end of the pipe.
bool AgentOutput::advance(Source& source) {
  char buffer[16384];
  for (;;) {
    const ssize_t n = ::read(source.pipe.get(), buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return true;
    if (n <= 0) break;
    source.text.append(buffer, static_cast<size_t>(n));
    size_t begin = 0;
    for (size_t end = 0; (end = source.text.find('\n', begin)) != std::string::npos; begin = end + 1)
      take_line(source.text.substr(begin, end - begin));
    source.text.erase(0, begin);
  }
  if (!source.text.empty()) take_line(source.text);
  source.text.clear();
  return false;
}

void AgentOutput::take_line(const std::string& line) {
  if (auto report = failure_report_of(line)) {
    {
      const std::lock_guard lock(mutex_);
      reports_.push_back(*std::move(report));
    }
    ::kill(::getpid(), SIGCHLD);
    return;
  }
  std::fputs((line + "\n").c_str(), stderr);
}

}  // namespace tessera::launcher

// AgentOutput: the standard error of the programs that start launchers on hosts, in which reports of
// failures are found.
#pragma once

#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/files/file_descriptor.h"
#include "launcher/failure/failure_report.h"

namespace tessera::launcher {

/// Relays what the launchers on other hosts write. Owns a thread that reads pipes line by line: a
/// FailureReport is kept, everything else goes to standard error. Thread-safe.
class AgentOutput {
 public:
  /// Reads from now on until the end of all pipes.
  explicit AgentOutput(std::vector<FileDescriptor> pipes);
  AgentOutput(const AgentOutput&) = delete;
  AgentOutput& operator=(const AgentOutput&) = delete;
  ~AgentOutput() = default;

  /// Must be called when the programs have ended. Reads what is left, and returns the reports. A process that
  /// still holds a pipe open, such as a shared connection of ssh, is not waited for.
  std::vector<FailureReport> finish();
  /// Whether a report has come. Whenever one comes, this process gets SIGCHLD.
  bool has_report();

 private:
  struct Source {
    FileDescriptor pipe;
    std::string text;
  };
  void read_all(const std::stop_token& stop);
  bool advance(Source& source);
  void take_line(const std::string& line);

  std::vector<Source> sources_;
  std::mutex mutex_;
  std::vector<FailureReport> reports_;
  std::jthread thread_;
};

}  // namespace tessera::launcher

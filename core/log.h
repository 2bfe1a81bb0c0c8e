// Logger: writes a run's messages. A value that is passed to its users (there is no global logger): copies
// share the sinks; a default-constructed one is silent. Only log.cc includes spdlog, whose fmt differs from
// the one in libtorch's wheel.
#pragma once

#include <memory>
#include <string>

namespace tessera {

enum class LogLevel { kInfo, kWarning, kError };

struct LogOptions {
  std::string name = "tessera";  ///< printed in front of each line in the file
  bool terminal = true;          ///< also write to stderr, as "[warning] …" (info lines bare)
  std::string file;              ///< also append to this file, with time and level; empty: none
};

/// Writes messages to the sinks that it was made with. Thread-safe. Owns its sinks together with its copies.
class Logger {
 public:
  Logger() = default;  ///< silent
  /// Throws tessera::Error naming the file when it cannot be opened.
  explicit Logger(const LogOptions& options);

  void info(const std::string& line) const { write(LogLevel::kInfo, line); }
  void warning(const std::string& line) const { write(LogLevel::kWarning, line); }
  void error(const std::string& line) const { write(LogLevel::kError, line); }

 private:
  struct Sinks;
  void write(LogLevel level, const std::string& line) const;
  std::shared_ptr<Sinks> sinks_;
};

}  // namespace tessera

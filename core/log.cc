#include "core/log.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include "core/error.h"
#include "core/terminal.h"
#include "core/utf8.h"

namespace tessera {
namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo: return spdlog::level::info;
    case LogLevel::kWarning: return spdlog::level::warn;
    case LogLevel::kError: return spdlog::level::err;
  }
  return spdlog::level::info;
}

/// Erases progress bars: moves to the start of the line, and erases it and the lines below.
std::string blank() {
  if (terminal_knows_sequences()) return "\r\x1b[J";
  std::string line(static_cast<size_t>(terminal_width(STDERR_FILENO)) + 1, ' ');
  line.front() = line.back() = '\r';
  return line;
}

/// Of a longer line, which has some value of a file, the middle is left out.
constexpr size_t kLongestLine = 4'000;

}  // namespace

struct Logger::Sinks {
  std::shared_ptr<spdlog::logger> terminal;
  std::shared_ptr<spdlog::logger> file;
  bool is_terminal = false;
};

Logger::Logger(const LogOptions& options) : sinks_(std::make_shared<Sinks>()) {
  if (options.terminal) {
    auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
    sinks_->terminal = std::make_shared<spdlog::logger>(options.name, sink);
    sinks_->terminal->set_pattern("%v");
    sinks_->is_terminal = isatty(STDERR_FILENO) == 1;
  }
  if (!options.file.empty()) {
    try {
      auto sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(options.file);
      sinks_->file = std::make_shared<spdlog::logger>(options.name, sink);
    } catch (const spdlog::spdlog_ex& error) {
      throw Error(options.file, ": cannot be opened as a log file (", error.what(), ")");
    }
    sinks_->file->set_pattern("%Y-%m-%d %H:%M:%S.%e [%n] [%l] %v");
    sinks_->file->flush_on(spdlog::level::info);
  }
}

void Logger::write(LogLevel level, const std::string& line) const {
  if (!sinks_) return;
  const bool is_long = line.size() > kLongestLine;
  const std::string safe = is_long ? abridged(line, kLongestLine)
                                   : without_control_characters(line, /*one_line=*/level == LogLevel::kError);
  if (sinks_->terminal) {
    // Information is printed without a prefix, other levels with their name.
    const char* prefix = level == LogLevel::kWarning ? "warning: "
                         : level == LogLevel::kError ? "error: "
                                                     : "";
    std::string shown = prefix + safe;
    // Progress bars are redrawn below.
    if (sinks_->is_terminal) shown = blank() + wrap_words(shown, terminal_width(STDERR_FILENO) - 1, 2);
    sinks_->terminal->log(to_spdlog(level), spdlog::string_view_t(shown));
    sinks_->terminal->flush();
  }
  if (sinks_->file) sinks_->file->log(to_spdlog(level), spdlog::string_view_t(safe));
}

}  // namespace tessera

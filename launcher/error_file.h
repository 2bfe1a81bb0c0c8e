// How a failing rank tells its launcher why. Ranks fail in heaps: one dies, the others find its connection
// closed and fail too, often sooner to be noticed than the first. So each writes its error with the time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::launcher {

/// Why a rank failed, as it says itself.
struct ErrorReport {
  int64_t time_ns = 0;  ///< CLOCK_MONOTONIC, which is one clock for all processes of a host
  std::string message;  ///< one line
};

/// Local. Tells the launcher why this rank is about to fail; call it where `main` catches. Writes the file
/// that TESSERA_ERROR_FILE names (ours), or TORCHELASTIC_ERROR_FILE (torchrun: its JSON, so that torchrun's
/// summary shows the message). The first report stays; without either variable nothing happens. Atomic: a
/// reader sees a whole report or none. Never throws: there is nobody left to tell.
void report_error(const std::string& message) noexcept;

/// Local. The report in `path`; none when the file is absent or not a report.
std::optional<ErrorReport> read_error_report(const std::string& path);

/// Local. The line near the end of a log that best says what went wrong: the last one that
/// speaks of an error, else the last that is not empty. Without terminal control sequences, 500
/// bytes at most. Empty when there is none.
std::string last_error_line(const std::string& log_path);

/// Local. Whether a log has a line that is not, in whole or in part, one of these messages.
bool says_more_than(const std::string& log_path, const std::vector<std::string>& messages);

/// Local. CLOCK_MONOTONIC.
int64_t monotonic_ns();

}  // namespace tessera::launcher

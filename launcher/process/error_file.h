// Error files: a failing rank reports its error to the launcher. When one rank dies the others fail as well,
// because its connections are closed, and may be noticed first. So each report has the time of the error.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::launcher {

/// A rank's report of its error.
struct ErrorReport {
  int64_t time_ns = 0;       ///< CLOCK_MONOTONIC, common to all processes of a host
  std::string message;       ///< one line
  bool would_recur = false;  ///< a mistake in the configuration: not to be restarted
  bool of_peer = false;      ///< another rank's end is why
};

/// What ends a rank: an error of its own, a mistake in the configuration, which another start would find
/// again, or another rank's end (PeerFailure).
enum class ErrorKind { kOwn, kWouldRecur, kOfPeer };

/// Reports the error that is about to end this rank; to be called where `main` catches. Writes the
/// file that TORCHELASTIC_ERROR_FILE names (this launcher gives the same name as TESSERA_ERROR_FILE), in the
/// format of torch.distributed.elastic.multiprocessing.errors.ErrorHandler, so that torchrun's summary shows
/// the message too. Does nothing without either variable, or if the file exists. Atomic: a reader sees a
/// complete report or none. `time_ns`: when it happened, as monotonic_ns(); 0: now. Never throws.
void report_error(const std::string& message, ErrorKind kind = ErrorKind::kOwn, int64_t time_ns = 0) noexcept;

/// The report in `path`, ours or that of a Python program under torch's @record; nullopt if the file
/// is absent or not a report.
std::optional<ErrorReport> read_error_report(const std::string& path);

/// The most likely error message near the end of a log: the last line that mentions an error, else the
/// last line that is not empty. Without terminal control sequences, at most 500 bytes. Empty if there is
/// none.
std::string last_error_line(const std::string& log_path);

/// Whether a log has a line that is not contained in one of these messages and does not contain one.
bool has_other_lines(const std::string& log_path, const std::vector<std::string>& messages);

/// CLOCK_MONOTONIC.
int64_t monotonic_ns();

}  // namespace tessera::launcher

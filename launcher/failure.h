// Which rank failed first, and how to say so. Pure functions over what was seen.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launcher/error_file.h"

namespace tessera::launcher {

/// How one rank ended.
struct RankExit {
  int rank = 0;
  int status = 0;                     ///< as waitpid gives it
  int64_t time_ns = 0;                ///< CLOCK_MONOTONIC, when the launcher saw it
  bool told_to_end = false;           ///< the launcher had signalled it before
  std::optional<ErrorReport> report;  ///< what it said itself (error_file.h)
};

/// A death that no other rank can have caused is taken to have begun this much before it was seen: its peers
/// may notice the closed connection, report it and be gone while the kernel still takes the process down.
inline constexpr int64_t kSignalHeadStartNs = 100'000'000;

/// Local. Whether the rank died of a signal that nobody sends: SIGSEGV, SIGBUS,
/// SIGILL, SIGFPE, SIGSYS or SIGTRAP.
bool crashed(const RankExit& exit);

/// Local. The exit that was the first failure by time, or null when no rank failed by itself. A rank's time
/// is that of its own report, else that of its end, less the head start if it was a signal that no peer can
/// cause (SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGSYS, SIGTRAP, SIGKILL). Ranks ended by the launcher don't count
/// unless they had reported an error, or crashed.
const RankExit* root_cause(const std::vector<RankExit>& exits);

/// Local. What every rank has reported, word for word: a mistake that all have met, which needs no rank's
/// name. None: they differ, or one has reported nothing.
std::optional<std::string> common_error(const std::vector<RankExit>& exits);

/// Local. What the launcher returns for this failure: its exit code, 128 + signal, or 1 for a rank that
/// had reported an error and was then ended by the launcher.
int exit_code(const RankExit& exit);

/// Local. "exit code 3", "SIGSEGV (segmentation fault)".
std::string describe_status(int status);

/// Local. "SIGTERM".
std::string signal_name(int signal);

}  // namespace tessera::launcher

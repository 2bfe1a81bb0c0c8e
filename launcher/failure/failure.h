// Finds the rank that failed first, and describes its failure. Pure functions of the ranks' exits.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launcher/process/error_file.h"

namespace tessera::launcher {

/// How one rank ended.
struct RankExit {
  int rank = 0;
  int status = 0;                     ///< as waitpid gives it
  int64_t time_ns = 0;                ///< CLOCK_MONOTONIC, when the launcher noticed it
  bool signalled = false;             ///< the launcher had sent it a signal before
  std::optional<ErrorReport> report;  ///< its own report (error_file.h)
};

/// A death that no other rank can have caused is assumed to have begun this long before it was noticed: its
/// peers may notice the closed connection, report it and exit while the kernel still ends the process.
inline constexpr int64_t kSignalHeadStartNs = 500'000'000;

/// Whether the rank died of a signal caused by its own code: SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGSYS
/// or SIGTRAP.
bool crashed(const RankExit& exit);

/// The first failure by time, or null if no rank failed by itself. Ranks whose report says that another one
/// has ended or left count only if no other has failed. A rank's time is that of its
/// report, else that of its end, minus the head start if it died of a signal that no peer can cause (SIGSEGV,
/// SIGBUS, SIGILL, SIGFPE, SIGSYS, SIGTRAP, SIGKILL). Ranks ended by the launcher do not count unless they
/// had reported an error or crashed.
const RankExit* root_cause(const std::vector<RankExit>& exits);

/// The message, if all ranks have failed with the same one: it can be shown without naming a rank.
/// Otherwise nullopt.
std::optional<std::string> common_error(const std::vector<RankExit>& exits);

/// The launcher's exit code for this failure: the rank's exit code, 128 + signal, or 1 for a rank that
/// had reported an error and was then ended by the launcher.
int exit_code(const RankExit& exit);

/// Returns the exit code of a process with this wait status: its own, or 128 + signal.
int exit_code(int status);

/// "exit code 3", "SIGSEGV (segmentation fault)".
std::string describe_status(int status);

/// "SIGTERM".
std::string signal_name(int signal);

}  // namespace tessera::launcher

// What the launcher says about a run that has failed: on which host, which rank, when, how, and its last
// error.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/log.h"
#include "launcher/failure/failure.h"
#include "launcher/failure/supervisor.h"
#include "launcher/process/run_files.h"

namespace tessera::launcher {

/// One host's failure, in a form that a launcher on a host hands to the launcher of the run.
struct FailureReport {
  std::string host;
  int rank = 0;
  int num_ranks = 1;
  int64_t time_ns = 0;     ///< CLOCK_REALTIME: hosts have no other clock in common
  std::string what;        ///< "exit code 3", "SIGKILL (killed); the kernel killed it because memory ran out"
  std::string error;       ///< the last error; may be empty
  bool is_common = false;  ///< all ranks of the host have reported this error
  std::string where;       ///< "the log of rank 3 is ..."; may be empty
  int exit_code = 1;
  bool would_recur = false;  ///< ErrorReport's
  bool of_peer = false;      ///< ErrorReport's
};

/// One line: "rank 2 of 4 failed first: exit code 3, on host n1 at 16:34:05.120; last error: ...", or
/// the error alone if it is common.
std::string describe(const FailureReport& report);

/// The report as a line that a launcher finds in the output of others, and back; nullopt: another
/// line.
std::string to_line(const FailureReport& report);
std::optional<FailureReport> failure_report_of(std::string_view line);

/// What is known about a run besides how its ranks ended.
struct RunFacts {
  int num_ranks = 1;                        ///< of all hosts
  bool is_rank_0_logged = false;            ///< its output is in a log too
  std::optional<int64_t> oom_kills_before;  ///< num_oom_kills() at the start
  bool announces = false;                   ///< hands the report to the launcher of the run
};

/// Logs why the run has failed, and which logs say more about it; or, if facts.announces, writes
/// to_line() to standard error instead. Logs worth reading are kept.
void report_failure(const Outcome& outcome, const RankExit* first, const RunFacts& facts, RunFiles& files,
                    const Logger& log);

/// What a report calls this host: the name of Slurm's node, else host_name().
std::string node_name();

}  // namespace tessera::launcher

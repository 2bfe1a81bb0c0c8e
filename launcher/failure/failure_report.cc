#include "launcher/failure/failure_report.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/host_name.h"
#include "core/json/json_reader.h"
#include "core/str.h"
#include "core/variables.h"
#include "launcher/environment/host.h"
#include "launcher/process/error_file.h"

namespace tessera::launcher {
namespace {

/// Begins the line of a report. mpirun, pdsh and srun may put something before it.
constexpr std::string_view kMark = "TESSERA_LAUNCH_FAILURE ";

bool is_logged(int rank, const RunFacts& facts) { return rank > 0 || facts.is_rank_0_logged; }

std::string last_error(const RankExit& exit, const RunFacts& facts, const RunFiles& files) {
  if (exit.report) return exit.report->message;
  return is_logged(exit.rank, facts) ? last_error_line(files.log(exit.rank)) : "";
}

/// The likely reason of a SIGKILL that the launcher has not sent.
std::string memory_hint(const RankExit& exit, std::optional<int64_t> oom_kills_before) {
  if (!WIFSIGNALED(exit.status) || WTERMSIG(exit.status) != SIGKILL || exit.signalled) return "";
  const auto now = num_oom_kills();
  if (!now || !oom_kills_before) return "; the usual reason is that the host ran out of memory";
  return *now > *oom_kills_before ? "; the kernel killed it because memory ran out" : "";
}

/// The ranks that ended with 0 and because of which `exit` failed.
std::string early_end_hint(const RankExit& exit, const std::vector<RankExit>& exits,
                           const std::string& error) {
  if (!exit.report || !exit.report->of_peer) return "";
  std::string hint;
  for (const RankExit& other : exits) {
    const bool is_named = error.find(str("rank ", other.rank, " ")) != error.npos;
    if (other.status != 0 || other.signalled || !is_named) continue;
    hint += str("; rank ", other.rank, " ended with exit code 0 while others still waited for it");
    if (other.report) hint += str(" (", other.report->message, ")");
  }
  return hint;
}

/// Whether this is the normal end of a rank interrupted by `signal`, which needs no report.
bool is_answer_to(const RankExit& exit, std::optional<int> signal) {
  if (!signal) return false;
  if (crashed(exit)) return false;  // most likely while saving
  return WIFSIGNALED(exit.status) || WEXITSTATUS(exit.status) == 128 + *signal ||
         WEXITSTATUS(exit.status) == 128 + SIGTERM;  // what most signals are forwarded as
}

/// A time of CLOCK_MONOTONIC as CLOCK_REALTIME.
int64_t wall_time_ns(int64_t monotonic) {
  const std::chrono::nanoseconds now = std::chrono::system_clock::now().time_since_epoch();
  return now.count() - (monotonic_ns() - monotonic);
}

/// "16:34:05.120", in this host's zone.
std::string clock_time(int64_t time_ns) {
  const time_t seconds = static_cast<time_t>(time_ns / 1'000'000'000);
  tm local{};
  ::localtime_r(&seconds, &local);
  char text[32];
  std::snprintf(text, sizeof(text), "%02d:%02d:%02d.%03d", local.tm_hour, local.tm_min, local.tm_sec,
                static_cast<int>(time_ns / 1'000'000 % 1000));
  return text;
}

FailureReport report_of(const RankExit& exit, const Outcome& outcome, const RunFacts& facts,
                        const RunFiles& files) {
  FailureReport report;
  const bool by_launcher = exit.signalled && WIFSIGNALED(exit.status) && !crashed(exit);
  report.host = node_name();
  report.rank = exit.rank;
  report.num_ranks = facts.num_ranks;
  report.time_ns = wall_time_ns(exit.report ? exit.report->time_ns : exit.time_ns);
  report.what = by_launcher ? "it reported an error and was then ended by the launcher"
                            : describe_status(exit.status) + memory_hint(exit, facts.oom_kills_before);
  report.error = last_error(exit, facts, files);
  report.error += early_end_hint(exit, outcome.exits, report.error);
  report.exit_code = exit_code(exit);
  report.would_recur = exit.report && exit.report->would_recur;
  report.of_peer = exit.report && exit.report->of_peer;
  if (const auto common = common_error(outcome.exits)) {
    report.error = *common;
    report.is_common = true;
  }
  return report;
}

/// Names the logs that say more than was printed: the failed rank's, or all.
std::string where_logs_are(const std::vector<int>& informative, const std::vector<int>& logged,
                           int failed_rank, const RunFiles& files) {
  if (informative.empty()) return "";
  const bool has_failed_rank =
      std::find(informative.begin(), informative.end(), failed_rank) != informative.end();
  if (has_failed_rank || informative.size() == 1) {
    const int rank = has_failed_rank ? failed_rank : informative.front();
    return str("the log of rank ", rank, " is ", files.log(rank));
  }
  return str("the logs of ranks ", logged.front(), " to ", logged.back(), " are ", files.log(logged.front()),
             " and on");
}

}  // namespace

std::string node_name() {
  // Slurm's nodes and pdsh's hosts may be several on one machine, in tests.
  const auto node = text_variable("SLURMD_NODENAME");
  return node ? *node : host_name();
}

std::string describe(const FailureReport& report) {
  if (report.is_common) return report.error;
  const char* clause = !report.error.empty() ? "; last error: "
                       : report.rank == 0    ? "; its output is above"
                                             : "";
  return str("rank ", report.rank, " of ", report.num_ranks, " failed", report.num_ranks > 1 ? " first" : "",
             ": ", report.what, ", on host ", report.host, " at ", clock_time(report.time_ns), clause,
             report.error);
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FailureReport, host, rank, num_ranks, time_ns, what, error, is_common,
                                   where, exit_code, would_recur, of_peer)

std::string to_line(const FailureReport& report) {
  const nlohmann::json json = report;
  return str(kMark, json.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace));
}

std::optional<FailureReport> failure_report_of(std::string_view line) {
  const size_t at = line.find(kMark);
  if (at == line.npos) return std::nullopt;
  try {
    return parse_json_or_discard(line.substr(at + kMark.size())).get<FailureReport>();
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

void report_failure(const Outcome& outcome, const RankExit* first, const RunFacts& facts, RunFiles& files,
                    const Logger& log) {
  std::optional<FailureReport> report;
  std::vector<std::string> printed;
  if (first && !is_answer_to(*first, outcome.interrupted_by)) {
    report = report_of(*first, outcome, facts, files);
    if (const std::string error = last_error(*first, facts, files); !error.empty()) printed.push_back(error);
  }
  std::vector<int> logged, informative;
  for (const RankExit& exit : outcome.exits)
    if (is_logged(exit.rank, facts)) logged.push_back(exit.rank);
  std::sort(logged.begin(), logged.end());
  for (const int rank : logged)
    if (has_other_lines(files.log(rank), printed)) informative.push_back(rank);
  const std::string where = where_logs_are(informative, logged, first ? first->rank : 0, files);
  if (!where.empty()) files.keep();
  if (report && facts.announces) {
    report->where = where;
    std::fputs((to_line(*report) + "\n").c_str(), stderr);
    return;
  }
  if (report) log.error(describe(*report));
  if (!where.empty()) log.info(where);
}

}  // namespace tessera::launcher

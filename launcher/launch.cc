#include "launcher/launch.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>

#include "core/error.h"
#include "core/file_descriptor.h"
#include "core/str.h"
#include "core/temporary_folder.h"
#include "launcher/environment.h"
#include "launcher/failure.h"
#include "launcher/guard.h"
#include "launcher/host.h"
#include "launcher/port.h"
#include "launcher/process.h"
#include "launcher/signals.h"
#include "launcher/supervisor.h"

namespace tessera::launcher {
namespace {

namespace fs = std::filesystem;

void check(const Options& options) {
  if (options.nproc < 1 || options.nproc > kMaxRanks)
    throw ConfigError(str("--nproc ", options.nproc, ": expected 1 to ", kMaxRanks, " ranks on this host"));
  if (options.master_port < 0 || options.master_port > 65535)
    throw ConfigError(
        str("--master-port ", options.master_port, ": expected 1 to 65535, or 0 for a free port"));
  if (options.program.empty()) throw ConfigError("no program to launch was given");
}

/// The paths of a run's files. Owns a temporary folder, which is removed unless keep() was called.
class RunFiles {
 public:
  explicit RunFiles(const std::string& log_dir) {
    log_dir_ = log_dir.empty() ? temporary_.path() : fs::path(log_dir);
    std::error_code error;
    fs::create_directories(log_dir_, error);
    if (error)
      throw ConfigError(str("--log-dir ", log_dir, ": the folder cannot be made: ", error.message()));
  }

  /// Keeps the logs for the user to read.
  void keep() {
    if (log_dir_ == temporary_.path()) temporary_.keep();
  }
  std::string log(int rank) const { return (log_dir_ / name(rank, ".log")).string(); }
  std::string error(int rank) const { return (temporary_.path() / name(rank, ".error")).string(); }

 private:
  static std::string name(int rank, const char* suffix) {
    char text[32];
    std::snprintf(text, sizeof(text), "rank_%05d%s", rank, suffix);
    return text;
  }
  TemporaryFolder temporary_{"tessera"};
  fs::path log_dir_;
};

std::string new_run_id() {
  unsigned char bytes[8] = {};
  if (::getrandom(bytes, sizeof(bytes), 0) < 0) return std::to_string(monotonic_ns());
  std::string id;
  for (const unsigned char byte : bytes) {
    char hex[3];
    std::snprintf(hex, sizeof(hex), "%02x", byte);
    id += hex;
  }
  return id;
}

FileDescriptor open_file(const std::string& path, int flags) {
  FileDescriptor fd(::open(path.c_str(), flags | O_CLOEXEC, 0644));
  if (!fd) throw ConfigError(str(path, ": cannot be opened: ", std::strerror(errno)));
  return fd;
}

/// Opens descriptors 0 to 2 if they are closed, so that no file opened later gets one of these numbers.
void ensure_standard_files() {
  int fd = 0;
  do {
    fd = ::open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= 2);
  if (fd > 2) ::close(fd);
}

/// While it lives, orphaned descendants of this process become its children. The destructor kills them.
class Subreaper {
 public:
  Subreaper() {
    ::prctl(PR_GET_CHILD_SUBREAPER, &previous_);
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  }
  Subreaper(const Subreaper&) = delete;
  Subreaper& operator=(const Subreaper&) = delete;
  ~Subreaper() {
    end_orphans();
    ::prctl(PR_SET_CHILD_SUBREAPER, previous_);
  }

 private:
  int previous_ = 0;
};

Process spawn_rank(const Options& options, const RankVariables& variables, const RunFiles& files,
                   const FileDescriptor& null, const sigset_t& mask) {
  SpawnOptions spawn;
  spawn.program = options.program;
  spawn.args = options.args;
  spawn.environment = rank_environment(variables);
  spawn.signal_mask = mask;
  FileDescriptor log;
  if (variables.rank > 0) {
    log = open_file(files.log(variables.rank), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND);
    spawn.stdout_fd = spawn.stderr_fd = log.get();
  }
  // Ranks are background jobs of the terminal and cannot read from it. Rank 0 reads a pipe or a file.
  if (variables.rank > 0 || ::isatty(STDIN_FILENO)) spawn.stdin_fd = null.get();
  return Process::spawn(spawn);
}

std::string last_error(const RankExit& exit, const RunFiles& files) {
  if (exit.report) return exit.report->message;
  return exit.rank > 0 ? last_error_line(files.log(exit.rank)) : "";  // rank 0's output is not logged
}

/// The likely reason of a SIGKILL that the launcher has not sent.
std::string memory_hint(const RankExit& exit, std::optional<int64_t> oom_kills_before) {
  if (!WIFSIGNALED(exit.status) || WTERMSIG(exit.status) != SIGKILL || exit.signalled) return "";
  const auto now = num_oom_kills();
  if (!now || !oom_kills_before) return "; the usual reason is that the host ran out of memory";
  return *now > *oom_kills_before ? "; the kernel killed it because memory ran out" : "";
}

/// Whether this is the normal end of a rank interrupted by `signal`, which needs no report.
bool is_answer_to(const RankExit& exit, std::optional<int> signal) {
  if (!signal) return false;
  if (crashed(exit)) return false;  // most likely while saving
  return WIFSIGNALED(exit.status) || WEXITSTATUS(exit.status) == 128 + *signal ||
         WEXITSTATUS(exit.status) == 128 + SIGTERM;  // SIGHUP is forwarded as SIGTERM
}

std::string describe_failure(const RankExit& exit, int num_ranks, const RunFiles& files,
                             std::optional<int64_t> oom_kills_before) {
  const bool by_launcher = exit.signalled && WIFSIGNALED(exit.status) && !crashed(exit);
  const std::string error = last_error(exit, files);
  const char* clause = !error.empty() ? "; last error: " : exit.rank == 0 ? "; its output is above" : "";
  return str(
      "rank ", exit.rank, " of ", num_ranks, " failed", num_ranks > 1 ? " first" : "", ": ",
      by_launcher ? "it reported an error and was then ended by the launcher" : describe_status(exit.status),
      memory_hint(exit, oom_kills_before), clause, error);
}

/// Names the logs that say more than was printed: the failed rank's, or all.
std::string where_logs_are(const std::vector<int>& informative, int failed_rank, int num_ranks,
                           const RunFiles& files) {
  const bool has_failed_rank =
      std::find(informative.begin(), informative.end(), failed_rank) != informative.end();
  if (has_failed_rank || informative.size() == 1) {
    const int rank = has_failed_rank ? failed_rank : informative.front();
    return str("the log of rank ", rank, " is ", files.log(rank));
  }
  return str("the logs of ranks 1 to ", num_ranks - 1, " are ", files.log(1), " and on");
}

/// Logs why the run has failed, and which logs say more about it.
void report_failure(const Outcome& outcome, const RankExit* first, int num_ranks, RunFiles& files,
                    std::optional<int64_t> oom_kills_before, const Logger& log) {
  std::vector<std::string> printed;
  if (first && !is_answer_to(*first, outcome.interrupted_by)) {
    const auto common = common_error(outcome.exits);
    log.error(common ? *common : describe_failure(*first, num_ranks, files, oom_kills_before));
    if (const std::string error = last_error(*first, files); !error.empty()) printed.push_back(error);
  }
  std::vector<int> informative;
  for (int rank = 1; rank < num_ranks; ++rank)
    if (has_other_lines(files.log(rank), printed)) informative.push_back(rank);
  if (informative.empty()) return;
  files.keep();
  log.info(where_logs_are(informative, first ? first->rank : 0, num_ranks, files));
}

}  // namespace

int run(const Options& options, const Logger& log) {
  check(options);
  ensure_standard_files();
  const auto oom_kills_before = num_oom_kills();
  const PortReservation port(options.master_port);
  RunFiles files(options.log_dir);
  const FileDescriptor null = open_file("/dev/null", O_RDWR);

  // Declared in this order so that the destructors end the ranks, then the guard and the orphans, and restore
  // the signal mask last.
  SignalWatch signals;
  Subreaper subreaper;
  Guard guard;
  std::vector<Process> ranks;
  ranks.reserve(static_cast<size_t>(options.nproc));
  SupervisorOptions supervision{options.stop_grace, options.save_grace, {}};
  RankVariables variables{0, options.nproc, options.master_addr, port.port(), new_run_id(), ""};
  for (int rank = 0; rank < options.nproc; ++rank) {
    variables.rank = rank;
    variables.error_file = files.error(rank);
    supervision.error_files.push_back(variables.error_file);
    ranks.push_back(spawn_rank(options, variables, files, null, signals.previous_mask()));
    guard.watch(ranks.back().pid());
  }
  log.debug(str("started ", options.nproc, " ranks of ", options.program, ", rendezvous at ",
                options.master_addr, ":", port.port()));

  const Outcome outcome = Supervisor(ranks, guard, signals, supervision, log).supervise();
  const RankExit* first = root_cause(outcome.exits);
  // Also after an interrupt: all ranks have saved and exited with 0.
  if (std::all_of(outcome.exits.begin(), outcome.exits.end(),
                  [](const RankExit& exit) { return exit.status == 0; }))
    return 0;
  report_failure(outcome, first, options.nproc, files, oom_kills_before, log);
  if (outcome.interrupted_by && !(first && crashed(*first))) return 128 + *outcome.interrupted_by;
  return exit_code(*first);
}

}  // namespace tessera::launcher

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/files/disk_error.h"
#include "core/files/file_descriptor.h"
#include "core/str.h"
#include "launcher/cluster.h"
#include "launcher/failure/agent_output.h"
#include "launcher/failure/failure.h"
#include "launcher/failure/supervisor.h"
#include "launcher/launch.h"
#include "launcher/process/process.h"
#include "launcher/process/signals.h"
#include "launcher/remote_folders.h"

namespace tessera::launcher {
namespace {

using Clock = std::chrono::steady_clock;

/// The time from a failure on one host until the others are ended: they may be about to report the same, or
/// to fail because of it.
constexpr auto kSettle = std::chrono::seconds(2);
/// What launchers on hosts have to end their ranks after a failure on another one: theirs is 2 s.
constexpr std::chrono::milliseconds kStopGrace{3000};
/// What they need beyond that, or beyond --save-grace, to end themselves.
constexpr std::chrono::milliseconds kEndGrace{5000};

/// One running program, and the end of its standard input that keeps the launcher on its host alive.
struct Running {
  Process process;
  FileDescriptor input;
  std::string label;
  int end_signal = 0;
  int status = 0;
  bool was_ended = false;  ///< here, by a signal
  Clock::time_point ended_at = Clock::time_point::max();
};

void send_all(int fd, const std::string& text) {
  for (size_t sent = 0; sent < text.size();) {
    const ssize_t n = ::send(fd, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // the program has ended, and its exit code says why
    sent += static_cast<size_t>(n);
  }
}

/// This process's environment, then the variables. Of several values of a name the last counts.
std::vector<std::string> environment_with(const std::vector<std::string>& variables) {
  std::map<std::string, std::string, std::less<>> values;
  const auto set = [&](std::string_view line) {
    values.insert_or_assign(std::string(line.substr(0, line.find('='))), std::string(line));
  };
  for (char** entry = environ; *entry; ++entry) set(*entry);
  for (const std::string& variable : variables) set(variable);
  std::vector<std::string> environment;
  for (auto& [name, line] : values) environment.push_back(std::move(line));
  return environment;
}

Running start(const EngineCommand& command, const sigset_t& mask, std::vector<FileDescriptor>& errors) {
  int sockets[2], pipe[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0 || ::pipe2(pipe, O_CLOEXEC) != 0)
    throw CommError(command.label, ": no pipe could be made: ", describe_errno(errno));
  FileDescriptor ours(sockets[0]), theirs(sockets[1]), write_end(pipe[1]);
  errors.emplace_back(pipe[0]);
  SpawnOptions spawn;
  spawn.program = command.program;
  spawn.args = command.args;
  spawn.environment = environment_with(command.variables);
  spawn.signal_mask = mask;
  spawn.stdin_fd = theirs.get();
  spawn.stderr_fd = write_end.get();
  Running running{Process::spawn(spawn), std::move(ours), command.label, command.end_signal};
  theirs.reset();
  send_all(running.input.get(), command.input);
  return running;
}

/// The programs of a run, until all have ended.
class ClusterSupervisor {
 public:
  ClusterSupervisor(std::vector<Running>& programs, SignalWatch& signals, AgentOutput& output,
                    std::chrono::milliseconds grace, Logger log)
      : programs_(programs), signals_(signals), output_(output), grace_(grace), log_(std::move(log)) {}

  /// Returns when all have ended.
  void supervise() {
    while (std::any_of(programs_.begin(), programs_.end(),
                       [](const Running& one) { return one.process.running(); })) {
      const auto signal = signals_.wait(deadline_);
      if (signal == SIGTSTP) signals_.stop_here();
      if (signal && *signal != SIGTSTP && *signal != SIGCHLD) on_signal(*signal);
      collect_ended();
      if (deadline_ && Clock::now() >= *deadline_) end_all();
    }
  }

  /// The signal that interrupted the run, if one did.
  std::optional<int> interrupted_by() const { return interrupted_by_; }
  /// Whether a signal asked for the end, also after a failure.
  bool was_asked() const { return was_asked_; }

 private:
  void on_signal(int signal) {
    const bool goes_on = signals_.policy().passes_on(signal);
    const bool passed = step_ == 0 && (goes_on || signals_.policy().is_handled(signal)) && pass_on(signal);
    if (goes_on)
      return log_.info(
          str(signal_name(signal), passed ? ": passed on to the hosts' ranks"
                                          : ": not passed on: the ranks end, or their launcher does "
                                            "not take it to them"));
    was_asked_ = true;
    if (!interrupted_by_ && step_ == 0)
      log_.warning(str(signal_name(signal), ": the ranks have ", static_cast<double>(grace_.count()) / 1000.0,
                       " s to end; a second signal kills them"));
    if (!interrupted_by_) interrupted_by_ = signal;
    end_all();
  }

  /// The launchers that ssh has started read it, mpirun and srun hand SIGUSR1 on. Returns whether one got it.
  bool pass_on(int signal) {
    bool passed = false;
    for (const Running& one : programs_)
      if (one.end_signal == 0) {
        send_all(one.input.get(), std::string(1, signal_byte(signal)));
        passed = true;
      } else if (one.process.running() && signals_.policy().is_end_by_user_2 && signal == SIGUSR1) {
        one.process.signal(signal);
        passed = true;
      }
    return passed;
  }

  /// First the launchers on the hosts end as by SIGTERM; then the programs here are ended, and killed.
  void end_all() {
    ++step_;
    // Only a launcher that ssh has started hears that it is because of a failure (signals.h).
    const bool after_failure = step_ == 1 && !was_asked_ && !timed_out_ &&
                               std::all_of(programs_.begin(), programs_.end(),
                                           [](const Running& one) { return one.end_signal == 0; });
    const std::chrono::milliseconds grace = after_failure ? kStopGrace : grace_;
    deadline_ = Clock::now() + (step_ == 1 ? grace + kEndGrace : kEndGrace);
    for (Running& one : programs_) {
      if (after_failure) send_all(one.input.get(), std::string(1, kFailureByte));
      one.input.reset();
      const int signal = step_ == 1 ? one.end_signal : step_ == 2 ? SIGTERM : SIGKILL;
      if (signal == 0) continue;
      one.was_ended |= step_ > 1 && one.process.running();
      one.process.signal(signal);
    }
    if (step_ > 2) deadline_.reset();
  }

  void collect_ended() {
    for (Running& one : programs_) {
      if (!one.process.running() || !one.process.has_ended()) continue;
      one.status = one.process.collect();
      one.ended_at = Clock::now();
      has_failed_ |= one.status != 0;
      timed_out_ |= exit_code(one.status) == kTimeoutExitCode;
    }
    if ((has_failed_ || output_.has_report()) && step_ == 0 && !deadline_) deadline_ = Clock::now() + kSettle;
  }

  std::vector<Running>& programs_;
  SignalWatch& signals_;
  AgentOutput& output_;
  const std::chrono::milliseconds grace_;
  const Logger log_;
  std::optional<Clock::time_point> deadline_;
  std::optional<int> interrupted_by_;
  int step_ = 0;  ///< of ending
  bool has_failed_ = false;
  bool timed_out_ = false;  ///< --timeout: the hosts end by themselves, and save
  bool was_asked_ = false;
};

/// As root_cause().
bool is_earlier(const FailureReport& a, const FailureReport& b) {
  return a.of_peer != b.of_peer ? b.of_peer : a.time_ns < b.time_ns;
}

/// Logs the first failure by the hosts' clocks; the exit code.
int report(std::vector<FailureReport> reports, const std::vector<Running>& programs, int num_hosts,
           std::optional<int> interrupted_by, const Logger& log) {
  const Running* failed = nullptr;
  for (const Running& one : programs)
    if (one.status != 0 && (!failed || one.ended_at < failed->ended_at)) failed = &one;
  if (!failed) return 0;
  std::sort(reports.begin(), reports.end(), &is_earlier);
  if (!reports.empty()) {
    FailureReport first = reports.front();
    const auto is_alike = [&](const FailureReport& one) { return one.is_common && one.error == first.error; };
    first.is_common = static_cast<int>(reports.size()) == num_hosts &&
                      std::all_of(reports.begin(), reports.end(), is_alike);
    log.error(describe(first));
    if (!first.where.empty()) log.info(str(first.where, " on host ", first.host));
    return interrupted_by ? 128 + *interrupted_by : first.exit_code;
  }
  if (interrupted_by) return 128 + *interrupted_by;
  const int code = exit_code(failed->status);
  if (code != kTimeoutExitCode)
    log.error(str(failed->label, " failed: ", describe_status(failed->status), "; what it said is above"));
  return code;
}

constexpr int kSshFailed = 255;

/// Returns, with ssh, whether the host of this program is gone. A launcher there that ends by itself reports
/// why.
bool is_lost(const Running& program, size_t node, const ClusterOptions& options,
             const std::vector<FailureReport>& reports) {
  if (options.engine != Engine::kSsh) return false;
  const auto before = options.hosts.begin() + static_cast<std::ptrdiff_t>(node);
  const auto count = [](int sum, const Host& host) { return sum + static_cast<int>(host.slots.size()); };
  const int first = std::accumulate(options.hosts.begin(), before, 0, count);
  const auto is_from_it = [&](const FailureReport& one) {
    return one.rank >= first && one.rank < count(first, *before);
  };
  if (std::any_of(reports.begin(), reports.end(), is_from_it)) return false;
  return program.was_ended || exit_code(program.status) == kSshFailed;
}

/// One attempt.
Ending run_once(const ClusterOptions& options, SignalWatch& signals, const Logger& log) {
  std::vector<FileDescriptor> errors;
  const Subreaper subreaper;  // pdsh leaves its ssh processes when it is ended
  std::vector<Running> programs;
  for (const EngineCommand& command : engine_commands(options))
    programs.push_back(start(command, signals.previous_mask(), errors));
  AgentOutput output(std::move(errors));
  ClusterSupervisor supervisor(programs, signals, output, options.save_grace, log);
  supervisor.supervise();
  const std::vector<FailureReport> reports = output.finish();
  Ending ending;
  ending.exit_code = report(reports, programs, options.num_nodes, supervisor.interrupted_by(), log);
  ending.was_asked = supervisor.was_asked() || ending.exit_code == kTimeoutExitCode;
  const auto first = std::min_element(reports.begin(), reports.end(), &is_earlier);
  ending.would_recur = first != reports.end() && first->would_recur;
  for (size_t node = 0; node < programs.size(); ++node)
    if (is_lost(programs[node], node, options, reports)) ending.lost.push_back(static_cast<int>(node));
  return ending;
}

RestartPolicy policy_of(const ClusterOptions& options) {
  RestartPolicy policy = options.restarts;
  for (const Host& host : options.hosts)
    policy.members.push_back({"host " + host.name, static_cast<int>(host.slots.size())});
  for (int node = 0; options.hosts.empty() && node < options.num_nodes; ++node)
    policy.members.push_back({str("host ", node), options.nproc});
  return policy;
}

/// What `attempt` changes.
ClusterOptions options_of(const ClusterOptions& options, const Attempt& attempt) {
  ClusterOptions changed = options;
  changed.restart_count = attempt.restart_count;
  if (attempt.arguments) changed.args = *attempt.arguments;
  if (options.hosts.empty()) return changed;
  changed.hosts.clear();
  changed.memory_folders.clear();
  for (const int member : attempt.members) {
    changed.hosts.push_back(options.hosts[static_cast<size_t>(member)]);
    if (!options.memory_folders.empty())
      changed.memory_folders.push_back(options.memory_folders[static_cast<size_t>(member)]);
  }
  changed.num_nodes = static_cast<int>(changed.hosts.size());
  if (attempt.members.front() != 0) changed.master_addr.clear();  // it was that of the first host
  return changed;
}

}  // namespace

int run_cluster(const ClusterOptions& options, const Logger& log) {
  ::signal(SIGPIPE, SIG_IGN);            // as in run()
  SignalWatch signals(options.signals);  // between attempts it keeps the signals that come
  RemoteFolders memory(options, signals.previous_mask());
  const auto run = [&](const Attempt& attempt, std::chrono::milliseconds time_limit) {
    ClusterOptions all = options;
    all.memory_folders = memory.make();
    ClusterOptions now = options_of(all, attempt);
    now.timeout = time_limit;
    Ending ending = run_once(now, signals, log);
    for (const int place : ending.lost)
      memory.check(static_cast<size_t>(attempt.members[static_cast<size_t>(place)]));
    return ending;
  };
  return run_attempts(policy_of(options), options.timeout, signals, run, log);
}

}  // namespace tessera::launcher

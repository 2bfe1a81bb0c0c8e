#include "launcher/launch.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <optional>

#include "core/error.h"
#include "core/files/disk_error.h"
#include "core/files/file_descriptor.h"
#include "core/files/temporary_folder.h"
#include "core/str.h"
#include "launcher/environment/core_binding.h"
#include "launcher/environment/environment.h"
#include "launcher/environment/host.h"
#include "launcher/environment/port.h"
#include "launcher/environment/run_id.h"
#include "launcher/failure/failure.h"
#include "launcher/failure/failure_report.h"
#include "launcher/failure/supervisor.h"
#include "launcher/process/error_file.h"
#include "launcher/process/guard.h"
#include "launcher/process/process.h"
#include "launcher/process/run_files.h"
#include "launcher/process/signals.h"
#include "launcher/process/tee.h"

namespace tessera::launcher {
namespace {

void check(const Options& options) {
  if (options.nproc < 1 || options.nproc > kMaxRanks)
    throw ConfigError("--nproc ", options.nproc, ": expected 1 to ", kMaxRanks, " ranks on this host");
  if (options.master_port < 0 || options.master_port > 65535)
    throw ConfigError("--master-port ", options.master_port, ": expected 1 to 65535, or 0 for a free port");
  if (options.num_nodes < 1 || options.num_nodes > kMaxRanks)
    throw ConfigError("--nnodes ", options.num_nodes, ": expected 1 to ", kMaxRanks, " hosts");
  if (options.node_rank < 0 || options.node_rank >= options.num_nodes)
    throw ConfigError("--node-rank ", options.node_rank, ": expected 0 to ", options.num_nodes - 1,
                      ", because there are ", options.num_nodes, " hosts (--nnodes)");
  if (options.program.empty()) throw ConfigError("no program to launch was given");
}

/// Opens descriptors 0 to 2 if they are closed, so that no file opened later gets one of these numbers.
void ensure_standard_files() {
  int fd = 0;
  do {
    fd = ::open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= 2);
  if (fd > 2) ::close(fd);
}

/// This host's part of the run.
struct Share {
  int first_rank = 0;
  int num_ranks = 1;
  int world_size = 1;
};

Share share_of(const Options& options) {
  if (options.ranks_by_node.empty())
    return {options.node_rank * options.nproc, options.nproc, options.num_nodes * options.nproc};
  const auto here = options.ranks_by_node.begin() + options.node_rank;
  return {std::accumulate(options.ranks_by_node.begin(), here, 0), *here,
          std::accumulate(options.ranks_by_node.begin(), options.ranks_by_node.end(), 0)};
}

std::vector<std::vector<Core>> cores_of_ranks(const Options& options, int num_ranks) {
  if (!options.bind_cores) return std::vector<std::vector<Core>>(static_cast<size_t>(num_ranks));
  std::vector<int> threads = allowed_threads();
  for (const int thread : options.core_list)
    if (std::find(threads.begin(), threads.end(), thread) == threads.end())
      throw ConfigError("--bind-core-list: this process may not run on core ", thread);
  return share_cores(numa_nodes(options.core_list.empty() ? threads : options.core_list), num_ranks);
}

/// Makes the ranks of this host one after another.
class RankStarter {
 public:
  RankStarter(const Options& options, const Share& share, int port, const RunFiles& files,
              const sigset_t& mask)
      : options_(options),
        share_(share),
        files_(files),
        mask_(mask),
        cores_(cores_of_ranks(options, share.num_ranks)),
        null_(open_file("/dev/null", O_RDWR)) {
    variables_.world_size = share.world_size;
    variables_.local_world_size = share.num_ranks;
    variables_.node_rank = options.node_rank;
    variables_.num_nodes = options.num_nodes;
    variables_.master_addr = options.master_addr;
    variables_.master_port = port;
    variables_.run_id = options.run_id;
    variables_.memory_folder = options.memory_folder;
    variables_.restart_count = options.restart_count;
    variables_.max_restarts = options.max_restarts;
    // If there are several hosts, whoever starts them gives it to all of them.
    if (options.num_nodes == 1 && !options.is_agent)
      variables_.run_secret = new_run_secret(options.variables);
    variables_.visible_devices = options.visible_devices;
    variables_.given = options.variables;
  }

  bool is_logged(int rank) const { return rank > 0 || options_.tee; }

  Process start(int local_rank) {
    const int rank = share_.first_rank + local_rank;
    variables_.rank = rank;
    variables_.local_rank = local_rank;
    variables_.error_file = files_.error(rank);
    SpawnOptions spawn;
    spawn.program = options_.program;
    spawn.args = options_.args;
    spawn.signal_mask = mask_;
    for (const Core& core : cores_[static_cast<size_t>(local_rank)])
      spawn.cores.insert(spawn.cores.end(), core.begin(), core.end());
    if (options_.bind_cores)
      variables_.num_cores = static_cast<int>(cores_[static_cast<size_t>(local_rank)].size());
    spawn.environment = rank_environment(variables_);
    constexpr int kNew = O_WRONLY | O_CREAT | O_TRUNC | O_APPEND;
    FileDescriptor log, errors;
    if (is_logged(rank)) {
      log = open_file(files_.log(rank), kNew);
      spawn.stdout_fd = spawn.stderr_fd = log.get();
    } else if (options_.watch_stdin) {
      log = open_file(files_.output(rank), kNew);
      errors = open_file(files_.errors(rank), kNew);
      spawn.stdout_fd = log.get();
      spawn.stderr_fd = errors.get();
    }
    // Ranks are background jobs of the terminal and cannot read from it. Rank 0 reads a pipe or a file.
    if (rank > 0 || options_.watch_stdin || ::isatty(STDIN_FILENO)) spawn.stdin_fd = null_.get();
    return Process::spawn(spawn);
  }

 private:
  const Options& options_;
  const Share share_;
  const RunFiles& files_;
  const sigset_t mask_;
  const std::vector<std::vector<Core>> cores_;
  const FileDescriptor null_;
  RankVariables variables_;
};

// Output without a reader.
// When the connection to a host breaks, or the launcher of the run is killed, sshd closes its ends of the
// output of this host's launcher. A rank that had inherited them would get SIGPIPE at its next write, or an
// exception, before it has saved; and while the connection only stands still, it would wait. So under ssh
// rank 0 writes to files, too.

std::vector<ShownFile> shown_files(const Options& options, const Share& share, const RunFiles& files) {
  std::vector<ShownFile> shown;
  for (int local = 0; options.tee && local < share.num_ranks; ++local) {
    const auto& chosen = options.tee_ranks;
    const int rank = share.first_rank + local;
    if (chosen.empty() || std::find(chosen.begin(), chosen.end(), local) != chosen.end())
      shown.push_back({files.log(rank), str("[rank ", rank, "] "), STDOUT_FILENO});
  }
  if (!options.tee && options.watch_stdin && share.first_rank == 0) {
    shown.push_back({files.output(0), "", STDOUT_FILENO});
    shown.push_back({files.errors(0), "", STDERR_FILENO});
  }
  return shown;
}

/// What `attempt` changes.
Options options_of(const Options& options, const Attempt& attempt) {
  Options changed = options;
  changed.restart_count += attempt.restart_count;
  changed.max_restarts += options.restarts.max_restarts;
  if (attempt.arguments) changed.args = *attempt.arguments;
  return changed;
}

/// Serves an exception: then the ranks are ended next, and other processes may get their numbers.
struct ForgetAtEnd {
  Guard& guard;
  const std::vector<Process>& ranks;
  ~ForgetAtEnd() {
    for (const Process& rank : ranks)
      if (rank.running()) guard.forget(rank.pid());
  }
};

/// One attempt, from the first process to the end of the last.
Ending run_once(const Options& options, SignalWatch& signals, Guard& guard, const Logger& log) {
  const Share share = share_of(options);
  RunFacts facts{share.world_size, options.tee, num_oom_kills(), options.is_agent};
  std::optional<PortReservation> port;  // rank 0's
  const bool is_fixed = options.num_nodes > 1 && options.master_port == 0;
  const int asked = is_fixed ? kDefaultMasterPort : options.master_port;
  if (options.node_rank == 0) port.emplace(asked);
  RunFiles files(options.log_dir, options.restart_count);
  guard.remove_if_killed(Guard::Folder::kFiles, files.temporary());

  Subreaper subreaper;  // declared first, so that the destructors end the ranks, then the orphans
  std::vector<Process> ranks;
  ranks.reserve(static_cast<size_t>(share.num_ranks));
  const ForgetAtEnd forget{guard, ranks};
  SupervisorOptions supervision{options.save_grace, {}, share.first_rank, options.timeout};
  RankStarter starter(options, share, port ? port->port() : asked, files, signals.previous_mask());
  for (int local = 0; local < share.num_ranks; ++local) {
    supervision.error_files.push_back(files.error(share.first_rank + local));
    ranks.push_back(starter.start(local));
    guard.watch(ranks.back().pid());
  }

  Outcome outcome;
  {
    // Its end comes before a report of a failure: what ranks have written is shown by then.
    const std::vector<ShownFile> shown = shown_files(options, share, files);
    const Tee tee(shown, [&](int error) {
      files.keep();
      log.warning(str("the output of ranks cannot be written: ", describe_errno(error), "; it is in ",
                      shown.front().path, shown.size() > 1 ? " and the files beside it" : ""));
    });
    outcome = Supervisor(ranks, guard, signals, supervision, log).supervise();
  }
  const RankExit* first = root_cause(outcome.exits);
  Ending ending{.was_asked = outcome.was_asked,
                .would_recur = first && first->report && first->report->would_recur};
  // Also after an interrupt: all ranks have saved and exited with 0.
  const bool succeeded = std::all_of(outcome.exits.begin(), outcome.exits.end(),
                                     [](const RankExit& exit) { return exit.status == 0; });
  if (!succeeded) report_failure(outcome, first, facts, files, log);
  if (outcome.timed_out)
    ending.exit_code = kTimeoutExitCode;
  else if (outcome.interrupted_by && !succeeded && !(first && crashed(*first)))
    ending.exit_code = 128 + *outcome.interrupted_by;
  else if (!succeeded)
    ending.exit_code = exit_code(*first);
  return ending;
}

}  // namespace

int run(const Options& options, const Logger& log) {
  check(options);
  ensure_standard_files();
  // The one that started it on this host: sshd, mpirun, slurmstepd.
  if (options.is_agent) ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  // When nobody reads what this process says, a message must not end it before its ranks have saved.
  ::signal(SIGPIPE, SIG_IGN);
  Options first = options;
  if (first.run_id.empty()) first.run_id = new_run_id();  // the same after a restart
  Guard guard;
  // Only this user can read it. It outlives the ranks of an attempt: a restart continues from it.
  std::optional<TemporaryFolder> memory;
  if (first.restarts.max_restarts > 0 && options.num_nodes == 1 && first.memory_folder.empty()) try {
      const std::string path = memory.emplace("tessera_memory", "/dev/shm").path().string();
      guard.remove_if_killed(Guard::Folder::kMemory, path);
      first.memory_folder = path;
    } catch (const Error& error) {
      log.info(str("nothing is kept in memory for a restart: ", error.what()));
    }
  first.restarts.members = {{"this host", options.nproc}};
  // Between attempts it keeps the signals that come.
  SignalWatch signals(options.signals, options.watch_stdin ? STDIN_FILENO : -1);
  const auto run = [&](const Attempt& attempt, std::chrono::milliseconds time_limit) {
    Options now = options_of(first, attempt);
    now.timeout = time_limit;
    return run_once(now, signals, guard, log);
  };
  return run_attempts(first.restarts, options.timeout, signals, run, log);
}

}  // namespace tessera::launcher

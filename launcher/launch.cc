#include "launcher/launch.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>

#include "core/error.h"
#include "core/file_descriptor.h"
#include "core/str.h"
#include "launcher/core_binding.h"
#include "launcher/environment.h"
#include "launcher/error_file.h"
#include "launcher/failure.h"
#include "launcher/failure_report.h"
#include "launcher/guard.h"
#include "launcher/host.h"
#include "launcher/port.h"
#include "launcher/process.h"
#include "launcher/run_files.h"
#include "launcher/signals.h"
#include "launcher/stdin_watch.h"
#include "launcher/supervisor.h"
#include "launcher/tee.h"

namespace tessera::launcher {
namespace {

void check(const Options& options) {
  if (options.nproc < 1 || options.nproc > kMaxRanks)
    throw ConfigError(str("--nproc ", options.nproc, ": expected 1 to ", kMaxRanks, " ranks on this host"));
  if (options.master_port < 0 || options.master_port > 65535)
    throw ConfigError(
        str("--master-port ", options.master_port, ": expected 1 to 65535, or 0 for a free port"));
  if (options.num_nodes < 1 || options.num_nodes > kMaxRanks)
    throw ConfigError(str("--nnodes ", options.num_nodes, ": expected 1 to ", kMaxRanks, " hosts"));
  if (options.node_rank < 0 || options.node_rank >= options.num_nodes)
    throw ConfigError(str("--node-rank ", options.node_rank, ": expected 0 to ", options.num_nodes - 1,
                          ", because there are ", options.num_nodes, " hosts (--nnodes)"));
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
      throw ConfigError(str("--bind-core-list: this process may not run on core ", thread));
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
    variables_.run_id = options.run_id.empty() ? new_run_id() : options.run_id;
    // Of several hosts, those who start them give it to all.
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
    FileDescriptor log;
    if (is_logged(rank)) {
      log = open_file(files_.log(rank), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND);
      spawn.stdout_fd = spawn.stderr_fd = log.get();
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

std::vector<RankLog> shown_logs(const Options& options, const Share& share, const RunFiles& files) {
  std::vector<RankLog> logs;
  for (int local = 0; options.tee && local < share.num_ranks; ++local) {
    const auto& chosen = options.tee_ranks;
    if (chosen.empty() || std::find(chosen.begin(), chosen.end(), local) != chosen.end())
      logs.push_back({share.first_rank + local, files.log(share.first_rank + local)});
  }
  return logs;
}

/// Two hexadecimal digits a byte.
template <size_t Size>
std::string random_digits() {
  unsigned char bytes[Size] = {};
  if (::getrandom(bytes, Size, 0) != Size) throw CommError("the system has no random numbers (getrandom)");
  std::string digits;
  for (const unsigned char byte : bytes) {
    char hex[3];
    std::snprintf(hex, sizeof(hex), "%02x", byte);
    digits += hex;
  }
  return digits;
}

}  // namespace

std::string new_run_id() { return random_digits<8>(); }

std::string new_run_secret(const std::vector<std::string>& variables) {
  const bool given = std::any_of(variables.begin(), variables.end(), [](const std::string& variable) {
    return variable.starts_with("TESSERA_RUN_SECRET=");
  });
  return given || std::getenv("TESSERA_RUN_SECRET") != nullptr ? "" : random_digits<16>();
}

int run(const Options& options, const Logger& log) {
  check(options);
  ensure_standard_files();
  // The one that started it on this host: sshd, mpirun, slurmstepd.
  if (options.is_agent) ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  // When it is gone, a message to it must not end this process before its ranks have saved.
  if (options.is_agent) ::signal(SIGPIPE, SIG_IGN);
  const Share share = share_of(options);
  RunFacts facts{share.world_size, options.tee, num_oom_kills(), options.is_agent};
  std::optional<PortReservation> port;  // rank 0's
  const bool is_fixed = options.num_nodes > 1 && options.master_port == 0;
  const int asked = is_fixed ? kDefaultMasterPort : options.master_port;
  if (options.node_rank == 0) port.emplace(asked);
  RunFiles files(options.log_dir);

  // Declared in this order so that the destructors end the ranks, then the guard and the orphans, and restore
  // the signal mask last.
  SignalWatch signals(options.is_agent ? SIGUSR1 : 0);
  Subreaper subreaper;
  Guard guard;
  const StdinWatch stdin_watch(options.watch_stdin);
  std::vector<Process> ranks;
  ranks.reserve(static_cast<size_t>(share.num_ranks));
  SupervisorOptions supervision{
      options.stop_grace, options.save_grace, {}, share.first_rank, options.timeout};
  RankStarter starter(options, share, port ? port->port() : asked, files, signals.previous_mask());
  for (int local = 0; local < share.num_ranks; ++local) {
    supervision.error_files.push_back(files.error(share.first_rank + local));
    ranks.push_back(starter.start(local));
    guard.watch(ranks.back().pid());
  }
  log.debug(str("started ", share.num_ranks, " ranks of ", options.program, ", rendezvous at ",
                options.master_addr, ":", port ? port->port() : asked));

  Outcome outcome;
  {
    const Tee tee(shown_logs(options, share, files), STDOUT_FILENO);
    outcome = Supervisor(ranks, guard, signals, supervision, log).supervise();
  }
  const RankExit* first = root_cause(outcome.exits);
  // Also after an interrupt: all ranks have saved and exited with 0.
  if (std::all_of(outcome.exits.begin(), outcome.exits.end(),
                  [](const RankExit& exit) { return exit.status == 0; }))
    return outcome.timed_out ? kTimeoutExitCode : 0;
  report_failure(outcome, first, facts, files, log);
  if (outcome.timed_out) return kTimeoutExitCode;
  if (outcome.interrupted_by && !(first && crashed(*first))) return 128 + *outcome.interrupted_by;
  return exit_code(*first);
}

}  // namespace tessera::launcher

// A run on several hosts: one `tessera launch` on each, started by a program that people have for it (ssh,
// pdsh, mpirun, srun). Here: the command lines, as values.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "core/log.h"
#include "launcher/environment/hosts.h"
#include "launcher/process/restarts.h"
#include "launcher/process/signals.h"

namespace tessera::launcher {

/// What starts the launchers on the hosts; kLocal: nothing, all ranks are here.
enum class Engine { kLocal, kSsh, kPdsh, kOpenMpi, kSlurm };

/// Finds the engine by the name that --launcher gets, in upper or lower case: "local", "ssh", "pdsh",
/// "openmpi", "slurm". Throws ConfigError with the names.
Engine engine_of(const std::string& name);

struct ClusterOptions {
  Engine engine = Engine::kSsh;
  std::vector<Host> hosts;  ///< in the order of their ranks; with kSlurm empty: Slurm chooses num_nodes
  int num_nodes = 1;        ///< hosts.size() where there are any
  int nproc = 1;            ///< ranks a host where there is no list of hosts
  std::string master_addr;  ///< empty: the first host; with kSlurm, as the ranks find it
  int master_port = 0;      ///< 0: one drawn from run_id
  int ssh_port = 0;         ///< 0: ssh's own
  std::vector<std::string> engine_args;  ///< --launcher-args
  std::string launcher;                  ///< the path of `tessera` on all hosts
  std::vector<std::string> flags;        ///< of `tessera launch` on each host, without its place
  std::string program;                   ///< of the ranks
  std::vector<std::string> args;
  std::vector<std::string> variables;  ///< "NAME=value" of --env-file
  std::string directory;               ///< the working directory on all hosts
  std::string run_id;
  /// TESSERA_RUN_SECRET; empty: as it is. With kPdsh no host gets any: all would see it in a command line.
  std::string run_secret;
  std::chrono::milliseconds save_grace{30000};
  std::chrono::milliseconds timeout{0};  ///< of the run; 0: none
  SignalPolicy signals;
  RestartPolicy restarts;  ///< after failures; its members are filled in
  int restart_count = 0;   ///< attempts before this one
  /// Has TESSERA_MEMORY_DIR of a host's ranks, by host. Empty: they have none.
  std::vector<std::string> memory_folders = {};
};

/// One program to start here.
struct EngineCommand {
  std::string program;
  std::string label;  ///< for messages: "ssh to n1", "srun"
  /// What makes the launchers on the hosts end their ranks as SIGTERM does, besides the end of standard
  /// input. mpirun and srun hand SIGUSR2 on (and SIGUSR1, which is the ranks'); after SIGTERM mpirun would
  /// kill them within a second. 0: none needed.
  int end_signal = 0;
  std::vector<std::string> args = {};
  std::vector<std::string> variables = {};  ///< "NAME=value", besides this process's
  std::string input = {};                   ///< what it reads; its standard input then stays open
};

/// Pure but for the environment, whose variables that ranks need (NCCL_*, PYTHON*, PATH ...) go with
/// the command where the engine does not hand them on itself.
std::vector<EngineCommand> engine_commands(const ClusterOptions& options);

/// An ssh to the host whose shell reads `line`.
EngineCommand ssh_command(const ClusterOptions& options, const std::string& host, const std::string& line);

/// `text` as one word of a POSIX shell.
std::string shell_quoted(const std::string& text);

/// Runs the commands to their end, as launcher::run its ranks: a signal is passed on, a failure ends
/// all of them, and the failure that was first by the hosts' clocks is logged; then restarts follow. With
/// kSsh a host is lost if ssh to it failed, or had to be ended. Returns the exit code. Throws CommError if a
/// program cannot be started.
int run_cluster(const ClusterOptions& options, const Logger& log);

}  // namespace tessera::launcher

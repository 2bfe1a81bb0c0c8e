// Starts the ranks of a program on this host and supervises them, as torchrun does. docs/launching.md
// describes what the ranks get and what the user sees.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "core/log.h"
#include "launcher/process/restarts.h"
#include "launcher/process/signals.h"

namespace tessera::launcher {

struct Options {
  int nproc = 1;                          ///< ranks on this host, 1 to kMaxRanks
  std::string program;                    ///< looked up in PATH if it has no '/'
  std::vector<std::string> args;          ///< argv[1], argv[2] …
  int num_nodes = 1;                      ///< hosts, each with a launcher of its own
  int node_rank = 0;                      ///< this host among them
  std::vector<int> ranks_by_node;         ///< where hosts differ; empty: nproc on each
  std::string master_addr = "127.0.0.1";  ///< MASTER_ADDR of the ranks
  int master_port = 0;                    ///< MASTER_PORT; 0: a free one, on several hosts kDefaultMasterPort
  std::string log_dir;  ///< folder for rank_00001.log …; empty: a temporary one, which is kept if the logs
                        ///< say more about a failure than was printed
  bool tee = false;     ///< show the output of `tee_ranks` with the rank before each line; it is in logs too
  std::vector<int> tee_ranks;            ///< local ranks; empty: all
  bool bind_cores = false;               ///< each rank on cores of its own (core_binding.h)
  std::vector<int> core_list;            ///< the hardware threads to share; empty: all
  std::string visible_devices;           ///< CUDA_VISIBLE_DEVICES of the ranks; empty: as it is
  std::vector<std::string> variables;    ///< "NAME=value" for the ranks
  std::string memory_folder;             ///< TESSERA_MEMORY_DIR; empty: run() makes one if it may restart
  std::string run_id;                    ///< TESSERA_RUN_ID; empty: a new one
  std::chrono::milliseconds timeout{0};  ///< ends the run as SIGTERM does; 0: no limit
  SignalPolicy signals;
  RestartPolicy restarts;  ///< after failures; its members are filled in
  int restart_count = 0;   ///< of an agent, whose launcher restarts: TORCHELASTIC_RESTART_COUNT of its ranks
  int max_restarts = 0;    ///< and TORCHELASTIC_MAX_RESTARTS
  /// Started by the launcher of a run on several hosts: it gets the report of a failure.
  bool is_agent = false;
  bool watch_stdin = false;                     ///< ends as by SIGTERM when standard input ends
  std::chrono::milliseconds save_grace{30000};  ///< from a forwarded SIGINT or SIGTERM to SIGKILL
};

inline constexpr int kDefaultMasterPort = 29500;  ///< torchrun's

/// Runs the ranks to their end. Returns 0 if all have returned 0; otherwise 128 + the signal that
/// interrupted the launcher, or the exit code of the rank that failed first (128 + signal if a signal killed
/// it), or kTimeoutExitCode. Messages go to `log`. Rank 0 has the launcher's stdout and stderr, and its stdin
/// unless that is a terminal; with `tee` it writes to a log as the others. They read /dev/null and write to
/// their log files. When run() returns, all processes started by ranks have ended.
///
/// Must be called from a process without other children. No other thread may take its signals
/// (launcher/process/signals.h). Throws ConfigError for options out of range, and CommError if the port is in
/// use or the program cannot be started.
int run(const Options& options, const Logger& log);

}  // namespace tessera::launcher

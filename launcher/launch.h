// Starts N ranks of a program on this host and supervises them, as torchrun does. docs/launching.md describes
// what the ranks get and what the user sees.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "core/log.h"

namespace tessera::launcher {

struct Options {
  int nproc = 1;                          ///< ranks on this host, 1 to kMaxRanks
  std::string program;                    ///< looked up in PATH if it has no '/'
  std::vector<std::string> args;          ///< argv[1], argv[2] …
  std::string master_addr = "127.0.0.1";  ///< MASTER_ADDR of the ranks
  int master_port = 0;                    ///< MASTER_PORT; 0: a free one
  std::string log_dir;  ///< folder for rank_00001.log …; empty: a temporary one, which is kept if the logs
                        ///< say more about a failure than was printed
  std::chrono::milliseconds stop_grace{2000};   ///< from SIGTERM to SIGKILL after a rank failed
  std::chrono::milliseconds save_grace{30000};  ///< from a forwarded SIGINT or SIGTERM to SIGKILL
};

/// Local. Runs the ranks to their end. Returns 0 if all have returned 0; otherwise 128 + the signal that
/// interrupted the launcher, or the exit code of the rank that failed first (128 + signal if a signal killed
/// it). Messages go to `log`. Rank 0 has the launcher's stdout and stderr, and its stdin unless that is a
/// terminal. The others read /dev/null and write to their log files. When run() returns, all processes
/// started by ranks have ended.
///
/// To be called from a process without other children. No other thread may take its signals
/// (launcher/signals.h). Throws ConfigError for options out of range, and CommError if the port is in use or
/// the program cannot be started.
int run(const Options& options, const Logger& log);

}  // namespace tessera::launcher

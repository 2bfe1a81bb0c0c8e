// Starts N ranks of a program on this host and supervises them: what torchrun does, in milliseconds.
// docs/launching.md says what the ranks and the user see.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "core/log.h"

namespace tessera::launcher {

struct Options {
  int nproc = 1;                          ///< ranks on this host, 1 to kMaxRanks
  std::string program;                    ///< looked up in PATH when there is no '/' in it
  std::vector<std::string> args;          ///< argv[1] and on
  std::string master_addr = "127.0.0.1";  ///< MASTER_ADDR of the ranks
  int master_port = 0;                    ///< MASTER_PORT; 0: a free one
  std::string log_dir;  ///< rank_00001.log and on; empty: a temporary one, kept where it says more of a
                        ///< failure than was logged
  std::chrono::milliseconds stop_grace{2000};   ///< from SIGTERM to SIGKILL after a rank failed
  std::chrono::milliseconds save_grace{30000};  ///< from a passed-on SIGINT or SIGTERM to SIGKILL
};

/// Local. Runs the ranks to their end and returns 0 when all returned 0; else 128 + the signal that ended the
/// launcher, or the code of the rank that failed first (128 + signal if a signal killed it). Messages go to
/// `log`. Rank 0 has the launcher's stdout and stderr, and its stdin unless that is a terminal; the others
/// read /dev/null and write to their log files. No process that a rank has started is left when it returns.
///
/// Call it from a process without children of its own, and let no other thread take its signals
/// (launcher/signals.h). Throws ConfigError for options out of range, and CommError when the port is in use
/// or the program cannot be started.
int run(const Options& options, const Logger& log);

}  // namespace tessera::launcher

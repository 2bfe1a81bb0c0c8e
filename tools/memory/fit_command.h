// `tessera memory --fit`: proposes the cheapest setting of a configuration that fits into this machine's
// memory, and writes it as a configuration.
#pragma once

#include <string>
#include <vector>

#include "core/log.h"
#include "tools/launch/launch_command.h"

namespace tessera::tools {

struct FitFlags {
  std::string memory;          ///< a size; empty: what this machine has free
  std::string disk;            ///< a folder; empty: the configuration's nvme_path, or the folder of its runs
  bool no_disk = false;        ///< state stays in memory
  bool largest_batch = false;  ///< asks for the largest micro-batch
  bool fewest_ranks = false;   ///< asks for the fewest ranks, each with that memory
  bool least_memory = false;   ///< asks for the least memory
  std::string output;          ///< a file; empty: CONFIG's name with "_fit", beside it
};

/// Measures settings of the JSON file `config` (with `overrides`, as --set gives them) in processes
/// that it starts, prints them and its choice, and writes the file. Returns the exit code. Throws
/// ConfigError, one line, if nothing fits.
int run_fit(const std::string& config, const std::vector<std::string>& overrides, const FitFlags& flags,
            const LaunchFlags& launch, const Logger& log);

}  // namespace tessera::tools

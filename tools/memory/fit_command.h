// `tessera memory --fit`: proposes a setting of a configuration that fits into a limit, and writes it as a
// configuration.
//
// [Note: what costs least]
// Where model state lies decides most of what a step costs; a higher stage costs next to nothing. So settings
// are taken in this order, and the first that fits is proposed:
//
//   1. all in memory; then with the optimizer below it, and with the parameters too; on disk with the buffers
//      of CONFIG, with one buffer, and with small units;
//   2. there, the stages, at the micro-batch that CONFIG has and without recomputation;
//   3. at the highest stage, recomputation of what is cheap and of whole blocks, and then smaller
//      micro-batches, each of them first without recomputation.
//
// What does not fit by the formulas of model state is left out. The next one is tried: a short run of
// `tessera train`. Where it needs too much, what it needed beside model state is known, and the formulas
// leave out more. A limit that CONFIG fits into takes one trial, a narrow one up to some ten.
#pragma once

#include <string>
#include <vector>

#include "core/log.h"
#include "tools/launch/launch_command.h"

namespace tessera::tools {

struct FitFlags {
  std::string memory;    ///< a size; empty: what this machine has free
  std::string disk;      ///< a folder; empty: the configuration's nvme_path, or the folder of its runs
  bool no_disk = false;  ///< state stays in memory
  std::string output;    ///< a file; empty: CONFIG's name with "_fit", beside it
};

/// Tries settings of the JSON file `config` (with `overrides`, as --set gives them) in processes that it
/// starts, prints them and its choice, and writes the file. Returns the exit code. Throws ConfigError, one
/// line, if nothing fits.
int run_fit(const std::string& config, const std::vector<std::string>& overrides, const FitFlags& flags,
            const LaunchFlags& launch, const Logger& log);

}  // namespace tessera::tools

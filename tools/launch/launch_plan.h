// Derives what the launcher does from the flags of a command that starts ranks, and from the environment.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/log.h"
#include "launcher/cluster.h"
#include "launcher/launch.h"
#include "tools/launch/launch_flags.h"

namespace tessera::tools {

struct LaunchPlan {
  int num_ranks = 1;                                ///< of the whole run
  bool is_first_host = true;                        ///< what is checked once for a run is checked here
  launcher::Options local;                          ///< the ranks of this host
  std::optional<launcher::ClusterOptions> cluster;  ///< set: the ranks are on these hosts instead
  launcher::RestartPolicy restarts;                 ///< of either
};

/// Whether a command that may be a rank itself should start ranks: launcher::should_start_ranks, and
/// flags that name other hosts. Throws as that.
bool starts_ranks(const LaunchFlags& flags);

/// Throws ConfigError for flags that contradict each other, a host or slot that is not there, and a
/// file that cannot be read.
LaunchPlan plan_launch(const LaunchFlags& flags);

/// Runs `program` by the plan to its end; the exit code. Throws as launcher::run and
/// launcher::run_cluster.
int run_plan(LaunchPlan plan, const std::string& program, const std::vector<std::string>& args,
             const Logger& log);

}  // namespace tessera::tools

// The sets of environment variables by which launchers and schedulers tell a process its place in a group:
// one table. core/environment/environment.h reads it.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace tessera {

/// Names of variables with the same meaning; the first that is set counts.
using VariableNames = std::vector<const char*>;

struct EnvironmentScheme {
  const char* launcher = "";       ///< for messages
  VariableNames rank, world_size;  ///< the place in the group
  VariableNames local_rank = {};   ///< the place among the ranks of this host
  VariableNames local_world_size = {};
  /// One of these is set wherever this launcher started the process; where `rank` alone is set, it did not.
  VariableNames mark = {};
  /// Slurm's list of the numbers of tasks by host, and this host's index in it: instead of local_world_size.
  VariableNames tasks_per_host = {}, host_index = {};
  VariableNames hosts = {};  ///< Slurm's list of hosts: the first one has rank 0
  VariableNames job = {};    ///< together they tell two runs apart; MASTER_PORT is derived from them
  const char* advice = "";   ///< what to do if the variables are wrong
  /// How the launcher gives a variable to all ranks.
  const char* pass_address = "mpirun -x MASTER_ADDR=HOST";
};

/// torchrun's variables, which `tessera launch`, DeepSpeed's launcher, Ray Train, Accelerate and PyTorchJob
/// of Kubernetes set too, and people by hand.
const EnvironmentScheme& torchrun_scheme();

/// The others. The first that is found counts: mpirun inside of a Slurm job starts its own daemons by srun,
/// so that its ranks see both.
std::span<const EnvironmentScheme> other_schemes();

}  // namespace tessera

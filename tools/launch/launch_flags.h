// The flags of every command that starts ranks. Names are torchrun's and DeepSpeed's where these have them.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tessera::tools {

struct LaunchFlags {
  std::optional<int> nproc;         ///< -n, --nproc: ranks on each host
  std::optional<int> num_nodes;     ///< --nnodes; the greatest of MIN:MAX
  int fewest_nodes = 0;             ///< MIN of --nnodes MIN:MAX; 0: it was one number
  std::optional<int> max_restarts;  ///< --max-restarts
  std::optional<int> node_rank;     ///< --node-rank
  std::string master_addr;          ///< --master-addr; empty: this host, or the first one of the hostfile
  int master_port = 0;              ///< --master-port; 0: a free one
  std::string hostfile, include, exclude;
  std::string launcher;       ///< --launcher; empty: ssh with a hostfile, else local
  std::string launcher_args;  ///< words, separated by blanks
  int ssh_port = 0;
  std::vector<std::string> env_files;  ///< --env-file; of a variable in several the last one counts
  std::string rendezvous_timeout;      ///< --rendezvous-timeout, which is above --env-file; empty: not given
  std::string log_dir;  ///< --log-dir; empty: a temporary folder, kept if it says more about a failure than
                        ///< was printed
  std::optional<std::string> tee;  ///< --tee; "3" or "": all ranks of a host; "0:3,1:3": these
  bool bind_cores = false;
  std::string core_list;          ///< --bind-core-list
  double timeout_s = 0;           ///< 0: none
  double save_grace_s = 30;       ///< --save-grace
  std::string signals_to_handle;  ///< --signals-to-handle; empty: torchrun's
};

/// Adds the flags to `command`. `flags` must outlive the parse. --rendezvous-timeout becomes
/// TESSERA_RENDEZVOUS_TIMEOUT_S in this process's environment, which ranks inherit.
void add_launch_flags(CLI::App& command, LaunchFlags& flags);

}  // namespace tessera::tools

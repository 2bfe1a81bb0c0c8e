// The environment variables that give a rank its place in a group. Names and meaning are torchrun's
// (torch.distributed.run).
#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace tessera {

struct Environment {
  int rank = 0;                           ///< RANK
  int world_size = 1;                     ///< WORLD_SIZE
  int local_rank = 0;                     ///< LOCAL_RANK
  int local_world_size = 1;               ///< LOCAL_WORLD_SIZE (default: world_size)
  std::string master_addr = "127.0.0.1";  ///< MASTER_ADDR
  int master_port = 29500;                ///< MASTER_PORT
  /// True when torchrun's agent serves the store (TORCHELASTIC_USE_AGENT_STORE=True); rank 0 is then a
  /// client.
  bool agent_store = false;
  int restart_count = 0;  ///< TORCHELASTIC_RESTART_COUNT: an agent's store outlives the ranks it restarts
  /// TESSERA_STORE_FD: a listening socket on master_port, inherited from the launcher, for rank 0's store
  /// server (so that no other process can take the port before); -1: rank 0 opens a socket.
  int store_fd = -1;
  /// TESSERA_RENDEZVOUS_TIMEOUT_S: the launcher's --rendezvous-timeout, in place of
  /// comm::JoinOptions::rendezvous_timeout.
  std::optional<std::chrono::milliseconds> rendezvous_timeout = std::nullopt;
};

/// Local. Reads the variables above. If RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are all unset: a
/// single rank. Throws CommError naming the variable when one is malformed, missing beside the others, or out
/// of range (RANK >= WORLD_SIZE …). MASTER_ADDR and MASTER_PORT are needed when WORLD_SIZE is above 1.
Environment environment();

/// Local. True when RANK and WORLD_SIZE are both set (by our launcher, torchrun, or by hand): this process is
/// a rank and must not launch others.
bool in_group();

/// Local. The value of a variable that is a decimal integer; nullopt if it is unset or anything else.
std::optional<int> integer_variable(const char* name);

}  // namespace tessera

// Gloo for CPU tensors, through libtorch's ProcessGroupGloo.
#pragma once

#include <memory>
#include <string>

#include "comm/transport.h"

namespace tessera::comm {

struct GlooOptions {
  int rank = 0;
  int size = 1;
  /// GLOO_SOCKET_IFNAME: network interfaces, comma-separated; empty: `address`
  std::string interfaces = {};
  std::string address = "127.0.0.1";             ///< the local address to bind to
  std::chrono::milliseconds timeout{0};          ///< of a collective
  std::chrono::milliseconds connect_timeout{0};  ///< of connecting to all ranks
};

/// Collective. Connects every pair of ranks, which find each other through `store`. `on_failure` is called on
/// a thread of Gloo when a collective fails. Throws CommError when a rank cannot be reached or an interface
/// does not exist.
std::unique_ptr<Transport> make_gloo_transport(const GroupStore& store, const GlooOptions& options,
                                               FailureHook on_failure);

/// Local. (bytes of `full`) uint8: what a reduce_scatter takes while it is in flight.
at::Tensor gloo_reduction_buffer(const at::Tensor& full);

}  // namespace tessera::comm

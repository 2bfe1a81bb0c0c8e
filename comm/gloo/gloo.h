// Gloo for CPU tensors, through libtorch's ProcessGroupGloo.
//
// Two collectives are not c10d's. Its reduce_scatter is an all-reduce of a copy; ours is an all-to-all, which
// sends half the bytes of an all-reduce, and a sum in rank order (16-bit numbers in fp32). It takes a second
// buffer of the same size while it is in flight. Its all_gather takes a second buffer of full size; ours is
// one broadcast a slice.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/transport.h"
#include "core/log.h"

namespace gloo::transport {
class Device;
}

namespace tessera::comm {

/// Listening sockets, each with an I/O thread. Transports of one process may share them.
using GlooDevices = std::vector<std::shared_ptr<::gloo::transport::Device>>;

struct GlooOptions {
  int rank = 0;
  std::vector<int> names = {0};  ///< by rank: what messages call the transport's ranks
  /// GLOO_SOCKET_IFNAME: network interfaces, comma-separated; empty: `address`
  std::string interfaces = {};
  std::string address = "127.0.0.1";             ///< the local address to bind to
  bool verify = false;                           ///< JoinOptions::verify
  std::chrono::milliseconds timeout{0};          ///< of a collective
  std::chrono::milliseconds connect_timeout{0};  ///< of connecting to all ranks
  GlooDevices devices = {};                      ///< empty: of its own
  std::function<void()> on_end =
      {};        ///< called on a thread of Gloo when a collective has ended. Must not throw
  Logger log{};  ///< says on rank 0 that all connect again, and why

  int size() const { return static_cast<int>(names.size()); }
  int name(int r) const { return names[static_cast<size_t>(r)]; }
  /// These options for some of the ranks, with this one's place among them.
  GlooOptions of_ranks(const std::vector<int>& ranks) const;
};

/// Throws CommError when an interface does not exist or an address cannot be bound.
GlooDevices open_gloo_devices(const GlooOptions& options);

/// Adds a reduce_scatter() of uneven slices, which hybrid communication needs.
class GlooTransport : public Transport {
 public:
  using Transport::reduce_scatter;
  /// Collective. reduce_scatter() of slices of different lengths: `full` has `numels[r]` elements for rank r,
  /// one rank's after another's; empty: slices of one length. Elements are added in rank order.
  virtual PendingPtr reduce_scatter(const at::Tensor& full, const std::vector<int64_t>& numels,
                                    const ReduceInto& into, uint32_t tag) = 0;
};

/// What begins the cause of a collective that failed because a rank received other bytes than were sent.
inline constexpr std::string_view kAlteredData = "data was altered on its way: ";

/// Collective. Connects every pair of ranks, which find each other through `store`, and proves the
/// connections [Note: proven connections]. `on_failure` is called on a thread of Gloo when a collective
/// fails. Throws CommError when a rank cannot be reached or an interface does not exist.
std::unique_ptr<GlooTransport> make_gloo_transport(const GroupStore& store, const GlooOptions& options,
                                                   FailureHook on_failure);

/// (bytes) uint8, not initialised, counted as communication: for what a reduction takes while it is in
/// flight. Dispatches no operator.
at::Tensor reduction_buffer(int64_t bytes);

}  // namespace tessera::comm

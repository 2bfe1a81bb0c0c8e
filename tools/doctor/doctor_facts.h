// Facts about this host, for `tessera doctor`.
#pragma once

#include <string>

#include "tools/doctor/doctor_report.h"

namespace tessera::tools {

/// Loads the CUDA plugin if there is a driver.
HostFacts host_facts();

/// This host's name, address, interface and link in the network between ranks: as the backends choose
/// them, by GLOO_SOCKET_IFNAME (NCCL: NCCL_SOCKET_IFNAME), else by the route to `master_addr`. No address,
/// and `chosen_by` the reason, where there is none.
void find_network(HostReport& host, const std::string& master_addr, int master_port, bool is_cuda);

}  // namespace tessera::tools

// --bind-cores: which cores each rank of this host runs on.
#pragma once

#include <string>
#include <vector>

namespace tessera::launcher {

/// A physical core: the numbers of its hardware threads.
using Core = std::vector<int>;
/// The cores of each NUMA node that this process may use.
using NumaNodes = std::vector<std::vector<Core>>;

/// Reads /sys/devices/system below `root`: nodes that have cores, limited to the hardware threads
/// `allowed`. One node if the system names none.
NumaNodes numa_nodes(const std::vector<int>& allowed, const std::string& root = "/");

/// The hardware threads that this process may use (its affinity).
std::vector<int> allowed_threads();

/// Returns whole physical cores, by rank: ranks are spread over the NUMA nodes in order, and share those of a
/// node evenly, so that no rank spans two nodes unless it has all of both (fewer ranks than nodes). With more
/// ranks than physical cores on a node its hardware threads are shared instead. Throws ConfigError with more
/// ranks than hardware threads.
std::vector<std::vector<Core>> share_cores(const NumaNodes& nodes, int num_ranks);

}  // namespace tessera::launcher

#include "launcher/environment/core_binding.h"

#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/str.h"
#include "launcher/environment/hosts.h"

namespace tessera::launcher {
namespace {

namespace fs = std::filesystem;

/// The numbers in a file of /sys; empty if there is none.
std::vector<int> numbers_in(const fs::path& path) {
  std::string line;
  std::ifstream file(path);
  if (!std::getline(file, line) || line.empty()) return {};
  return parse_numbers(line, path.string());
}

/// The physical cores of these hardware threads.
std::vector<Core> cores_of(const std::vector<int>& threads, const fs::path& cpus) {
  std::vector<Core> cores;
  std::set<int> left(threads.begin(), threads.end());
  while (!left.empty()) {
    const int first = *left.begin();
    Core core;
    for (const int sibling : numbers_in(cpus / str("cpu", first) / "topology/thread_siblings_list"))
      if (left.erase(sibling)) core.push_back(sibling);
    if (left.erase(first)) core.push_back(first);
    std::sort(core.begin(), core.end());
    cores.push_back(std::move(core));
  }
  return cores;
}

/// Items `index` of `count` parts of 0 to `size`, as even as can be.
std::pair<size_t, size_t> part(size_t size, size_t count, size_t index) {
  return {size * index / count, size * (index + 1) / count};
}

}  // namespace

std::vector<int> allowed_threads() {
  cpu_set_t set;
  std::vector<int> threads;
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return threads;
  for (int thread = 0; thread < CPU_SETSIZE; ++thread)
    if (CPU_ISSET(static_cast<size_t>(thread), &set)) threads.push_back(thread);
  return threads;
}

NumaNodes numa_nodes(const std::vector<int>& allowed, const std::string& root) {
  const fs::path system = fs::path(root) / "sys/devices/system";
  std::vector<int> of_nodes;
  NumaNodes nodes;
  for (const int node : numbers_in(system / "node/online")) {
    std::vector<int> threads;
    for (const int thread : numbers_in(system / str("node/node", node) / "cpulist"))
      if (std::find(allowed.begin(), allowed.end(), thread) != allowed.end()) threads.push_back(thread);
    of_nodes.insert(of_nodes.end(), threads.begin(), threads.end());
    if (!threads.empty()) nodes.push_back(cores_of(threads, system / "cpu"));
  }
  if (of_nodes.size() < allowed.size()) return {cores_of(allowed, system / "cpu")};
  return nodes;
}

std::vector<std::vector<Core>> share_cores(const NumaNodes& nodes, int num_ranks) {
  const auto count = static_cast<size_t>(num_ranks);
  std::vector<std::vector<Core>> shares(count);
  if (count < nodes.size()) {  // several nodes a rank
    for (size_t rank = 0; rank < count; ++rank) {
      const auto [first, last] = part(nodes.size(), count, rank);
      for (size_t node = first; node < last; ++node)
        shares[rank].insert(shares[rank].end(), nodes[node].begin(), nodes[node].end());
    }
    return shares;
  }
  for (size_t node = 0; node < nodes.size(); ++node) {
    const auto [first, last] = part(count, nodes.size(), node);
    std::vector<Core> cores = nodes[node];
    if (cores.size() < last - first) {
      cores.clear();
      for (const Core& core : nodes[node])
        for (const int thread : core) cores.push_back({thread});
    }
    if (cores.size() < last - first)
      throw ConfigError("--bind-cores: ", last - first, " ranks for ", cores.size(),
                        " hardware threads of one NUMA node; expected at most a rank a thread");
    for (size_t rank = first; rank < last; ++rank) {
      const auto [from, to] = part(cores.size(), last - first, rank - first);
      shares[rank].assign(cores.begin() + static_cast<ptrdiff_t>(from),
                          cores.begin() + static_cast<ptrdiff_t>(to));
    }
  }
  return shares;
}

}  // namespace tessera::launcher

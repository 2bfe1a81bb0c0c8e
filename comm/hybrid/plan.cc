#include "comm/hybrid/plan.h"

#include <algorithm>

namespace tessera::comm::hybrid {

Range Slices::of(int i) const {
  const int64_t first = std::min(begin + i * stride, end);
  return {first, std::min(longest, end - first)};
}

Slices evenly(int64_t begin, int64_t end, int count) {
  const int64_t longest = (end - begin + count - 1) / count;
  return {begin, longest, longest, end};
}

int64_t ColumnPart::numel() const {
  int64_t sum = 0;
  for (const Range& slice : slices) sum += slice.numel;
  return sum;
}

std::vector<ColumnPart> column_parts(const Hosts& hosts, int rank, const Slices& slices) {
  std::vector<ColumnPart> parts;
  for (const int column : hosts.columns_of(rank)) {
    ColumnPart& part = parts.emplace_back();
    part.column = column;
    for (int host = 0; host < hosts.num_hosts(); ++host) {
      const int owner = hosts.owner(host, column);
      part.slices.push_back(owner < 0 ? Range{} : slices.of(owner));
    }
  }
  return parts;
}

int source_of(const Hosts& hosts, int rank, int slice) {
  return hosts.carrier(hosts.host_of(rank), hosts.index_of(slice));
}

int broadcast_source_of(const Hosts& hosts, int rank, int root, int column) {
  const int host = hosts.host_of(rank);
  return host == hosts.host_of(root) ? root : hosts.carrier(host, column);
}

int64_t received_by_reduce(const Hosts& hosts, int rank, const Slices& slices) {
  return (hosts.num_hosts() - 1) * slices.of(rank).numel;
}

}  // namespace tessera::comm::hybrid

#include "comm/control/hosts.h"

#include <algorithm>

namespace tessera::comm {

void Hosts::add_rank(int host) {
  if (host == num_hosts()) ranks_.emplace_back();
  std::vector<int>& ranks = ranks_[static_cast<size_t>(host)];
  index_of_.push_back(static_cast<int>(ranks.size()));
  ranks.push_back(num_ranks());
  host_of_.push_back(host);
  num_columns_ = std::max(num_columns_, static_cast<int>(ranks.size()));
}

int Hosts::carrier(int host, int column) const {
  const std::vector<int>& ranks = ranks_of(host);
  return ranks[static_cast<size_t>(column) % ranks.size()];
}

int Hosts::owner(int host, int column) const {
  const std::vector<int>& ranks = ranks_of(host);
  return static_cast<size_t>(column) < ranks.size() ? ranks[static_cast<size_t>(column)] : -1;
}

std::vector<int> Hosts::columns_of(int rank) const {
  std::vector<int> columns;
  for (int column = 0; column < num_columns_; ++column)
    if (carrier(host_of(rank), column) == rank) columns.push_back(column);
  return columns;
}

}  // namespace tessera::comm

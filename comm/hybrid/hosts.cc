#include "comm/hybrid/hosts.h"

#include <algorithm>
#include <map>

namespace tessera::comm::hybrid {

Hosts::Hosts(const std::vector<int>& host_of) {
  std::map<int, int> numbers;
  for (size_t rank = 0; rank < host_of.size(); ++rank) {
    const int host = numbers.try_emplace(host_of[rank], static_cast<int>(numbers.size())).first->second;
    if (host == num_hosts()) ranks_.emplace_back();
    std::vector<int>& ranks = ranks_[static_cast<size_t>(host)];
    host_of_.push_back(host);
    index_of_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(rank));
    num_columns_ = std::max(num_columns_, static_cast<int>(ranks.size()));
  }
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

}  // namespace tessera::comm::hybrid

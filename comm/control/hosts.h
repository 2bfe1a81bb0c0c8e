// Hosts: which ranks of a group are on one host, which means that they reach each other over the loopback
// interface, or that they share memory. A plain value, equal on all ranks.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

namespace tessera::comm {

/// Numbers hosts in the order of their lowest ranks. `index`: a rank's place among those of its host, in
/// rank order.
class Hosts {
 public:
  Hosts() = default;
  /// `host_of[r]`: of rank r, any number or word.
  template <class Name>
  explicit Hosts(const std::vector<Name>& host_of) {
    std::map<Name, int> numbers;
    for (const Name& name : host_of) add_rank(numbers.try_emplace(name, num_hosts()).first->second);
  }

  int num_ranks() const { return static_cast<int>(host_of_.size()); }
  int num_hosts() const { return static_cast<int>(ranks_.size()); }
  bool is_one() const { return num_hosts() == 1; }
  int host_of(int rank) const { return host_of_[static_cast<size_t>(rank)]; }
  int index_of(int rank) const { return index_of_[static_cast<size_t>(rank)]; }
  const std::vector<int>& ranks_of(int host) const { return ranks_[static_cast<size_t>(host)]; }

  // [Note: columns]
  // A column has one rank of each host, which exchange over the network what belongs to the column. Rank
  // `index` of a host is in column `index`; there are as many columns as the largest host has ranks. A host
  // with fewer ranks takes turns: column c is carried there by its rank number c modulo its ranks. So every
  // host is in every column, and the network's work is spread over a host's ranks as evenly as they allow.

  int num_columns() const { return num_columns_; }
  /// The rank that carries a column on a host.
  int carrier(int host, int column) const;
  /// The rank whose own slices the column has to bring to that host; -1: none, the host has fewer ranks.
  int owner(int host, int column) const;
  /// The columns that a rank carries, ascending; at least one.
  std::vector<int> columns_of(int rank) const;

 private:
  void add_rank(int host);

  std::vector<int> host_of_, index_of_;  ///< by rank
  std::vector<std::vector<int>> ranks_;  ///< by host
  int num_columns_ = 0;
};

}  // namespace tessera::comm

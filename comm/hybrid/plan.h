// Which part of a buffer a rank reduces, exchanges with other hosts, and takes from the ranks of its own
// host. Plain values, so that every case can be tested without a network.
//
// [Note: hybrid collectives]
// A buffer is cut into one slice a rank. Slices of a column's owners belong to the column.
//   reduce: the carrier of a column adds up the column's slices over the ranks of its host (reading their
//     memory), sends each other host's slice to the column's carrier there, and adds what it receives for its
//     own slice, in the order of hosts. So a sum is always ((ranks of host 0 in order) + (ranks of host 1 in
//     order) + …), for a reduce-scatter and an all-reduce alike.
//   gather: each owner's slice goes to the column's carriers on the other hosts; then every rank has (or
//     copies) the slices from the carriers of its host.
// An all-reduce is both, one after the other. A broadcast is a gather whose slices, one a column, all come
// from the root's host. A host receives each byte that it lacks once: with L ranks a host, 1/L of what it
// receives where every rank fetches all other ranks' slices for itself.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/control/hosts.h"

namespace tessera::comm::hybrid {

/// Names elements [begin, begin + numel) of a buffer.
struct Range {
  int64_t begin = 0;
  int64_t numel = 0;
  bool operator==(const Range&) const = default;
};

/// Names slices of a buffer, or a part of each: slice i has up to `longest` elements from `begin` + i *
/// `stride` on, and none from `end` on.
struct Slices {
  int64_t begin = 0;
  int64_t stride = 0;
  int64_t longest = 0;
  int64_t end = 0;
  Range of(int i) const;
};

/// Elements [begin, end), in `count` slices as even as can be, one after another.
Slices evenly(int64_t begin, int64_t end, int count);

/// Names what a rank exchanges in one of its columns.
struct ColumnPart {
  int column = 0;
  std::vector<Range> slices;  ///< by host: the owner's slice there; empty: no owner, or nothing in it
  int64_t numel() const;
};

/// Serves reductions and gathers. `slices`: one a rank.
std::vector<ColumnPart> column_parts(const Hosts& hosts, int rank, const Slices& slices);

/// Where a rank takes a slice from, after a gather: from this rank of its own host.
int source_of(const Hosts& hosts, int rank, int slice);

/// Where a rank takes a column's slice from in a broadcast from rank `root`, whose host has all slices.
int broadcast_source_of(const Hosts& hosts, int rank, int root, int column);

/// Elements that rank `rank` receives from other hosts.
int64_t received_by_reduce(const Hosts& hosts, int rank, const Slices& slices);

}  // namespace tessera::comm::hybrid

// Mesh: which ranks hold the shards of a unit. A value, equal on all ranks but for the rank itself.
//
// [Note: hybrid sharding]
// Without further settings all ranks hold one copy of the model state, in shards. With GroupSizes::shard = M
// (MiCS; FSDP's HYBRID_SHARD over a mesh of two dimensions) each shard group of M consecutive ranks holds a
// copy, a replica:
//
//               shard 0  shard 1    (shard dimension)
//   replica 0   rank 0   rank 1     gathers and reductions of backward stay in a shard group;
//   replica 1   rank 2   rank 3     at the accumulation boundary each replicate group (the ranks of one
//   (replicate dimension)           shard) sums its shard of the gradients
//
// The sum is ((ranks of replica 0, in order) + (ranks of replica 1, in order) + …), which is what hybrid
// communication gives where a shard group is a host. Every replica has the same bits afterwards, and makes
// the same update.
//
// What each element is computed once for (norms, checkpoints, histograms) goes by owned parts: a unit is cut
// into as many parts as there are ranks, as without replicas; the ranks of a replicate group share out the
// parts of their shard, and each rank owns one. Parts are added up in their own order, so norms have the bits
// of the same gradients without replicas.
//
// With GroupSizes::secondary = H (ZeRO++'s hpZ) shards are as without it, and each group of H consecutive
// ranks has a second copy of the parameters, in shards of its own. A unit's first gather after an update is
// over all ranks and leaves the second copy behind; later ones are within the group. It changes no sum.
#pragma once

#include <vector>

#include "zero/plan/layout.h"

namespace tessera::zero {

/// Groups of consecutive ranks; sizes divide the number of ranks.
struct GroupSizes {
  int shard = 0;      ///< that hold one copy of the model state among them; 0: all ranks
  int secondary = 0;  ///< that hold a second copy of the parameters among them; 0: there is none
  bool operator==(const GroupSizes&) const = default;
};

struct Mesh {
  int world = 1;
  int rank = 0;
  int shard_size = 1;      ///< ranks of a shard group
  int secondary_size = 0;  ///< 0: there is no second copy

  int shard() const { return rank % shard_size; }
  int replica() const { return rank / shard_size; }
  int num_replicas() const { return world / shard_size; }
  bool in_my_shard_group(int other) const { return other / shard_size == replica(); }
  /// The part that rank `of` owns, as an index among those of all ranks; the rank that owns a part.
  int owned_part(int of) const { return of % shard_size * num_replicas() + of / shard_size; }
  int owned_part() const { return owned_part(rank); }
  int rank_of_owned_part(int part) const {
    return part % num_replicas() * shard_size + part / num_replicas();
  }

  // The ranges are in a unit of `numel` elements, a multiple of `world`.
  Range shard_of(int64_t numel) const { return part(numel, shard(), shard_size); }
  Range owned_of(int64_t numel) const { return part(numel, owned_part(), world); }
  Range secondary_of(int64_t numel) const { return part(numel, rank % secondary_size, secondary_size); }

  /// The ranks that share a copy, that hold the same shard, that share a second copy: this one included.
  std::vector<int> shard_group_ranks() const { return ranks(replica() * shard_size, 1, shard_size); }
  std::vector<int> replicate_group_ranks() const { return ranks(shard(), shard_size, num_replicas()); }
  std::vector<int> secondary_ranks() const { return ranks(rank - rank % secondary_size, 1, secondary_size); }

 private:
  static Range part(int64_t numel, int index, int num) {
    return {index * (numel / num), (index + 1) * (numel / num)};
  }
  static std::vector<int> ranks(int first, int stride, int num) {
    std::vector<int> list;
    for (int i = 0; i < num; ++i) list.push_back(first + i * stride);
    return list;
  }
};

/// `sizes` divide `world`.
inline Mesh mesh_of(GroupSizes sizes, int world, int rank) {
  Mesh mesh;
  mesh.world = world;
  mesh.rank = rank;
  mesh.shard_size = sizes.shard > 0 ? sizes.shard : world;
  mesh.secondary_size = sizes.secondary;
  return mesh;
}

}  // namespace tessera::zero

// Mesh: which ranks hold the shards of a unit. A value, equal on all ranks but for the rank itself.
//
// [Note: hybrid sharding]
// Without further settings all ranks hold one copy of the model state, in shards. With GroupSizes::shard = M
// (MiCS; FSDP's HYBRID_SHARD over a mesh of two dimensions) each row of M consecutive ranks holds a copy:
//
//            shard 0  shard 1
//   row 0    rank 0   rank 1     gathers and reductions of backward stay in a row;
//   row 1    rank 2   rank 3     at the accumulation boundary each column sums its shard of the gradients
//
// The sum is ((ranks of row 0, in order) + (ranks of row 1, in order) + …), which is what hybrid
// communication gives where a row is a host. Every row has the same bits afterwards, and makes the same
// update.
//
// What each element is computed once for (norms, checkpoints, histograms) goes by pieces: a unit is cut into
// as many pieces as there are ranks, as without rows; the ranks of a column share out the pieces of their
// shard. Pieces are added up in their own order, so norms have the bits of the same gradients without
// rows.
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
  int shard_size = 1;      ///< ranks of a row
  int secondary_size = 0;  ///< 0: there is no second copy

  int shard() const { return rank % shard_size; }
  int row() const { return rank / shard_size; }
  int num_rows() const { return world / shard_size; }
  bool in_my_row(int other) const { return other / shard_size == row(); }
  /// The piece that `of` has, of those of its shard; the rank that has a piece.
  int piece(int of) const { return of % shard_size * num_rows() + of / shard_size; }
  int piece() const { return piece(rank); }
  int rank_of_piece(int piece) const { return piece % num_rows() * shard_size + piece / num_rows(); }

  // Of a unit of `numel` elements, a multiple of `world`.
  Range shard_of(int64_t numel) const { return part(numel, shard(), shard_size); }
  Range piece_of(int64_t numel) const { return part(numel, piece(), world); }
  Range secondary_of(int64_t numel) const { return part(numel, rank % secondary_size, secondary_size); }

  /// The ranks that share a copy, that hold the same shard, that share a second copy: this one included.
  std::vector<int> row_ranks() const { return ranks(row() * shard_size, 1, shard_size); }
  std::vector<int> column_ranks() const { return ranks(shard(), shard_size, num_rows()); }
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

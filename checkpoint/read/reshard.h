// Resharding: which saved elements go where when the model, world, unit size or packing has changed.
// Arithmetic only.
//
// A parameter is one range of elements in a saved unit and one in a current unit. The range a rank needs of a
// current unit (its shard, or all of it) is intersected with the parameter's range, and split at the saved
// shards' boundaries: these are the pieces to read, by elements of the parameter. One plan serves the weights
// and each optimizer state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/sharded/manifest.h"
#include "zero/plan/layout.h"

namespace tessera::checkpoint {

/// A parameter of the checkpoint and the parameter of the model that it fills.
struct Match {
  int saved = 0;
  int current = 0;
  bool operator==(const Match&) const = default;
};

/// How a checkpoint's parameters match a model's: by name, else by an alias. One saved parameter may match
/// several.
struct Comparison {
  std::vector<Match> matches;         ///< same name and shape, in the model's order
  std::vector<std::string> missing;   ///< the model's, not in the checkpoint
  std::vector<std::string> extra;     ///< the checkpoint's, not in the model
  std::vector<std::string> reshaped;  ///< "fc.weight: [10, 4] in the checkpoint, [12, 4] in the model"
  std::vector<std::string> unfrozen;  ///< trainable now, frozen when saved: weights but no optimizer state

  /// Every parameter of either side has its counterpart.
  bool exact() const { return missing.empty() && extra.empty() && reshaped.empty() && unfrozen.empty(); }
  /// One line: "2 parameters missing in the checkpoint (a, b); 1 not in the model (c); …". Empty when exact.
  std::string describe() const;
};

Comparison compare(const SavedLayout& saved, const zero::Layout& current);

/// Consecutive elements of a parameter to read, of its weights and of each of its states alike.
struct Piece {
  int file = 0;       ///< rank whose file holds them
  int parameter = 0;  ///< of the checkpoint
  int64_t first = 0;  ///< element of the parameter
  int64_t numel = 0;
  int unit = 0;       ///< current unit
  int64_t begin = 0;  ///< element within the current unit (not within the shard)
  bool operator==(const Piece&) const = default;
};

/// The pieces that fill `wanted` (by current unit), ordered by file, saved unit and position. Elements of
/// parameters without a match, and padding, are not covered.
std::vector<Piece> plan_reads(const SavedLayout& saved, const zero::Layout& current,
                              const std::vector<Match>& matches, const std::vector<zero::Range>& wanted);

}  // namespace tessera::checkpoint

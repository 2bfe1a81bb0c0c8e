// SavedLayout: where the parameters of a checkpoint are in its files: the part of a zero::Layout that readers
// need. World size, unit size and version may have been different, so the offsets are stored and not
// recomputed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "zero/plan/layout.h"

namespace tessera::checkpoint {

struct SavedUnit {
  DType dtype = DType::kFloat32;  ///< compute dtype
  bool trainable = true;
  int64_t numel = 0;  ///< a multiple of the world size; rank r's file holds the r-th slice
  bool operator==(const SavedUnit&) const = default;
};

struct SavedParameter {
  std::string name;
  std::vector<int64_t> shape;
  int group = 0;                     ///< index of its param group
  std::vector<std::string> aliases;  ///< further names of the same (tied) parameter
  int unit = 0;
  int64_t offset = 0;  ///< first element within the unit; a multiple of 64 bytes of the unit's dtype

  int64_t numel() const;
  zero::Range range() const { return {offset, offset + numel()}; }
  bool operator==(const SavedParameter&) const = default;
};

/// Where elements of a parameter are: in its unit's weights and in each of its states alike.
struct SavedPlace {
  int rank = 0;
  int64_t begin = 0;  ///< element of the rank's slice of the unit
  int64_t numel = 0;  ///< elements of the parameter from there on that this rank has
};

struct SavedLayout {
  int world_size = 1;
  std::vector<SavedUnit> units;
  std::vector<SavedParameter> parameters;

  int num_units() const { return static_cast<int>(units.size()); }
  bool is_trainable(const SavedParameter& parameter) const {
    return units[static_cast<size_t>(parameter.unit)].trainable;
  }
  int64_t shard_numel(int unit) const { return units[unit].numel / world_size; }
  /// Where element `first` of the parameter of this index is, which it must have.
  SavedPlace place(int parameter, int64_t first) const;
  /// Type of the weights in the files: fp32 masters of trainable units, the compute dtype of frozen ones.
  DType weights_type(int unit) const { return units[unit].trainable ? DType::kFloat32 : units[unit].dtype; }
  bool operator==(const SavedLayout&) const = default;
};

/// `with_frozen` = false: without the units that are not trainable; the others are numbered anew.
SavedLayout saved_layout(const zero::Layout& layout, bool with_frozen = true);

// Datasets of a rank's file, each one-dimensional, (shard_numel).

/// "/master/unit_00003" for a trainable unit, fp32; "/parameter/unit_00003"
/// for a frozen one, its compute dtype.
std::string weights_dataset(const SavedLayout& layout, int unit);
/// "/exp_avg/unit_00003", fp32; of trainable units.
std::string state_dataset(const std::string& state_name, int unit);
/// Letters, digits and _, and not the name of another group of the file.
bool is_state_name(const std::string& name);

}  // namespace tessera::checkpoint

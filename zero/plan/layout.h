// Layout: how parameters are packed into units and units are cut into shards. Pure arithmetic, without
// libtorch: names, shapes, offsets. Every stage uses the same Layout; so do tools that have no model.
//
// A unit is one flat buffer of one dtype, filled with parameters in registration order. Leaf modules are kept
// whole where they fit (a Linear's bias is used with its weight). Each parameter starts at a 64-byte
// boundary, because BLAS and vectorised sums change bits with alignment; a unit's length is a multiple of
// world x 64 bytes, so that it can be cut into equal shards, `world` of them or fewer (mesh.h). Offsets are
// in elements and the same in every buffer of the unit: parameters, gradients, master weights, optimizer
// states.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace tessera::zero {

/// Half-open range of elements.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t numel() const { return end > begin ? end - begin : 0; }
  bool operator==(const Range&) const = default;
};

/// The elements both ranges hold (empty: numel() == 0).
Range intersect(Range a, Range b);

struct ParameterSpec {
  std::string name;  ///< "encoder.layers.0.linear1.weight"
  std::vector<int64_t> shape;
  DType dtype = DType::kFloat32;
  bool trainable = true;
  int group = 0;                     ///< index of its param group
  std::vector<std::string> aliases;  ///< further names of the same (tied) parameter

  int64_t numel() const;
};

/// Where a parameter lies.
struct UnitSlice {
  int unit = 0;
  int64_t offset = 0;  ///< first element within the unit
  int64_t numel = 0;
  Range range() const { return {offset, offset + numel}; }
};

struct UnitSpec {
  DType dtype = DType::kFloat32;
  bool trainable = true;
  int64_t numel = 0;            ///< padded; a multiple of world x 64 bytes
  std::vector<int> parameters;  ///< indices, by offset
};

struct LayoutOptions {
  int world_size = 1;
  int64_t unit_numel =
      4'000'000;  ///< a unit is closed before it would grow beyond; a larger parameter gets a unit of its own
};

/// Packs parameters into units and cuts these into shards. Immutable. Throws std::logic_error for specs no
/// model can have (duplicate names, negative sizes).
class Layout {
 public:
  Layout(std::vector<ParameterSpec> parameters, const LayoutOptions& options);

  int world_size() const { return world_size_; }
  const std::vector<ParameterSpec>& parameters() const { return parameters_; }
  int num_parameters() const { return static_cast<int>(parameters_.size()); }
  const std::vector<UnitSpec>& units() const { return units_; }
  int num_units() const { return static_cast<int>(units_.size()); }
  const UnitSlice& slice(int parameter) const { return slices_[parameter]; }

  int64_t shard_numel(int unit) const { return units_[unit].numel / world_size_; }
  /// The elements of `unit` that are in shard `rank`.
  Range shard(int unit, int rank) const;
  /// The part of a parameter in shard `rank`, in the unit's elements (may be empty).
  Range shard_part(int parameter, int rank) const;

  /// Index of a parameter by its name or one of its aliases, or -1.
  int find(const std::string& name) const;

  /// Index of the parameter that has an element of a unit; -1 where none has it, as padding.
  int parameter_at(int unit, int64_t element) const;
  /// "unit 3 (layers.0.weight … layers.1.bias)", for errors.
  std::string describe(int unit) const;
  /// 64-bit XXH3 of everything above: ranks whose layouts differ cannot train together.
  uint64_t digest() const;

 private:
  void pack(int64_t unit_numel);
  void open_unit(const ParameterSpec& first);

  int world_size_;
  std::vector<ParameterSpec> parameters_;
  std::vector<UnitSlice> slices_;
  std::vector<UnitSpec> units_;
  std::map<std::string, int> index_;
};

}  // namespace tessera::zero

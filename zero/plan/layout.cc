#include "zero/plan/layout.h"

#include <xxhash.h>

#include <algorithm>

#include "core/check.h"
#include "core/numel.h"

namespace tessera::zero {
namespace {

constexpr int64_t kAlignmentBytes = 64;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int64_t alignment_numel(DType dtype) { return kAlignmentBytes / size_bytes(dtype); }

/// "a.b.weight" -> "a.b": parameters of one leaf module share it.
std::string module_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? std::string() : name.substr(0, dot);
}

bool same_kind(const ParameterSpec& a, const ParameterSpec& b) {
  return a.dtype == b.dtype && a.trainable == b.trainable;
}

}  // namespace

Range intersect(Range a, Range b) {
  Range both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  both.end = std::max(both.begin, both.end);
  return both;
}

int64_t ParameterSpec::numel() const { return numel_of(shape); }

Layout::Layout(std::vector<ParameterSpec> parameters, const LayoutOptions& options)
    : world_size_(options.world_size), parameters_(std::move(parameters)) {
  TESSERA_CHECK(world_size_ >= 1 && options.unit_numel >= 1);
  for (int i = 0; i < static_cast<int>(parameters_.size()); ++i) {
    const ParameterSpec& spec = parameters_[i];
    for (int64_t size : spec.shape) TESSERA_CHECK(size >= 0, spec.name);
    TESSERA_CHECK(index_.emplace(spec.name, i).second, "two parameters are named ", spec.name);
    for (const std::string& alias : spec.aliases)
      TESSERA_CHECK(index_.emplace(alias, i).second, "two parameters are named ", alias);
  }
  pack(options.unit_numel);
}

void Layout::open_unit(const ParameterSpec& first) {
  units_.push_back({.dtype = first.dtype, .trainable = first.trainable, .numel = 0, .parameters = {}});
}

// Trainable and frozen parameters, and each dtype, fill units of their own, each kind in registration order.
void Layout::pack(int64_t unit_numel) {
  const int num_parameters = static_cast<int>(parameters_.size());
  slices_.resize(num_parameters);
  std::vector<bool> packed(num_parameters, false);
  for (int first = 0; first < num_parameters; ++first) {
    if (packed[first]) continue;
    const ParameterSpec& kind = parameters_[first];
    const int64_t align = alignment_numel(kind.dtype);
    open_unit(kind);
    for (int begin = first; begin < num_parameters;) {
      if (packed[begin] || !same_kind(parameters_[begin], kind)) {
        ++begin;
        continue;
      }
      // The run of parameters of this leaf module.
      std::vector<int> leaf;
      int64_t leaf_numel = 0;
      const std::string module = module_of(parameters_[begin].name);
      int end = begin;
      for (; end < num_parameters && module_of(parameters_[end].name) == module; ++end) {
        if (packed[end] || !same_kind(parameters_[end], kind)) continue;
        leaf.push_back(end);
        leaf_numel += round_up(parameters_[end].numel(), align);
      }
      const bool leaf_fits_a_unit = leaf_numel <= unit_numel;
      if (leaf_fits_a_unit && units_.back().numel > 0 && units_.back().numel + leaf_numel > unit_numel)
        open_unit(kind);
      for (int parameter : leaf) {
        const int64_t numel = parameters_[parameter].numel();
        if (units_.back().numel > 0 && units_.back().numel + round_up(numel, align) > unit_numel)
          open_unit(kind);
        UnitSpec& unit = units_.back();
        slices_[parameter] = {.unit = num_units() - 1, .offset = unit.numel, .numel = numel};
        unit.parameters.push_back(parameter);
        unit.numel += round_up(numel, align);
        packed[parameter] = true;
      }
      begin = end;
    }
  }
  for (UnitSpec& unit : units_) unit.numel = round_up(unit.numel, world_size_ * alignment_numel(unit.dtype));
}

Range Layout::shard(int unit, int rank) const {
  const int64_t numel = shard_numel(unit);
  return {rank * numel, (rank + 1) * numel};
}

Range Layout::shard_part(int parameter, int rank) const {
  const UnitSlice& slice = slices_[parameter];
  return intersect(slice.range(), shard(slice.unit, rank));
}

int Layout::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? -1 : found->second;
}

int Layout::parameter_at(int unit, int64_t element) const {
  const std::vector<int>& members = units_[unit].parameters;
  const auto after =
      std::ranges::upper_bound(members, element, {}, [&](int member) { return slices_[member].offset; });
  return after == members.begin() || slices_[*(after - 1)].range().end <= element ? -1 : *(after - 1);
}

std::string Layout::describe(int unit) const {
  const std::vector<int>& members = units_[unit].parameters;
  std::string text = str("unit ", unit, " (", parameters_[members.front()].name);
  if (members.size() > 1) text += str(members.size() > 2 ? " … " : ", ", parameters_[members.back()].name);
  return text + ")";
}

uint64_t Layout::digest() const {
  std::ostringstream text;
  text << "world " << world_size_ << '\n';
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterSpec& spec = parameters_[i];
    text << spec.name << ' ' << join(spec.shape, "x") << ' ' << name_of(spec.dtype) << ' ' << spec.trainable
         << ' ' << spec.group << ' ' << join(spec.aliases, ",") << " @ " << slices_[i].unit << '+'
         << slices_[i].offset << '\n';
  }
  for (const UnitSpec& unit : units_) text << unit.numel << '\n';
  const std::string bytes = text.str();
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace tessera::zero

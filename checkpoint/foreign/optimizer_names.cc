// [Note: names of numbers]
// torch.optim numbers the parameters as its groups have them: those of the first group from 0 on, then those
// of the second. A group has its parameters in the model's order, because programs make groups by going
// through named_parameters(). So each way to deal the model's parameters, in order, to the groups such that
// the counts and the shapes are those of the optimizer's state is one in which the numbers may have been
// given. Where there is exactly one such way, it is the truth. Where there are several, nothing in the files
// says which, and moments of one parameter would train another: then no name is given.
//
// With one group that has all parameters there is one way. The usual two, with and without weight decay, have
// matrices and vectors, which no shape mixes up. The Hugging Face Trainer's rule (transformers.Trainer,
// get_decay_parameter_names) is used where the folder is the Trainer's: biases and norms, by their names, are
// of the second group, other matrices are of the first.
//
// Without the model's order (a safetensors file sorts its names) a shape that one parameter has names it.
#include "checkpoint/foreign/optimizer_names.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "core/ascii.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

using Shape = std::vector<int64_t>;

constexpr size_t kMaxStates = size_t{1}
                              << 20;  // ways that are followed at the same time, over all parameters
constexpr uint16_t kSkipped = 0xffff;
constexpr size_t kMaxGroups = 64;

/// Whether the Trainer's patterns say that the name is a bias or of a norm: bias, layernorm, rmsnorm, and a
/// component that is "norm" or ends in "_norm".
bool has_no_decay(std::string_view name) {
  const std::string text = ascii_lower(name);
  for (const char* word : {"bias", "layernorm", "rmsnorm"})
    if (text.find(word) != text.npos) return true;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('.', begin), text.size());
    const std::string_view part = std::string_view(text).substr(begin, end - begin);
    if (part == "norm" || part.ends_with("_norm")) return true;
    begin = end + 1;
  }
  return false;
}

/// Follows all ways to deal the parameters, those that come to the same places together.
class Dealer {
 public:
  Dealer(const std::vector<NamedShape>& model, const std::vector<GroupShapes>& groups, bool hugging_face)
      : model_(model), groups_(groups), hugging_face_(hugging_face && groups.size() == 2) {
    for (const GroupShapes& group : groups) places_ += group.size();
  }

  NamedGroups deal() {
    if (places_ > model_.size())
      return fail(str("the optimizer has ", places_, " parameters, the model ", model_.size()));
    if (groups_.size() > kMaxGroups) return fail(str("there are ", groups_.size(), " groups"));
    layers_.push_back({{Places(groups_.size(), 0), {1, kSkipped}}});
    size_t states = 1;
    for (size_t i = 0; i < model_.size(); ++i) {
      Layer next;
      for (const auto& [places, way] : layers_.back()) {
        size_t dealt = 0;
        for (const uint32_t place : places) dealt += place;
        if (i - dealt < model_.size() - places_) add(next, places, way.count, kSkipped);
        for (size_t group = 0; group < groups_.size(); ++group) {
          if (!fits(i, group, places[group])) continue;
          Places after = places;
          ++after[group];
          add(next, after, way.count, static_cast<uint16_t>(group));
        }
      }
      if (next.empty())
        return fail(str("its shapes are not those of the model in order (no place for ", model_[i].name, " ",
                        describe_shape(model_[i].shape), ")"));
      states += next.size();
      if (states > kMaxStates) return fail("its groups may have been made in too many ways");
      layers_.push_back(std::move(next));
    }
    Places full;
    for (const GroupShapes& group : groups_) full.push_back(static_cast<uint32_t>(group.size()));
    const auto end = layers_.back().find(full);
    if (end == layers_.back().end()) return fail("its shapes are not those of the model in order");
    if (end->second.count > 1) return fail("several orders of the model's parameters have these shapes");
    return walk_back(std::move(full));
  }

 private:
  using Places = std::vector<uint32_t>;  // by group: how many of its places have a parameter
  struct Way {
    int count;       // 1, or 2 for several
    uint16_t group;  // that the last parameter was dealt to
  };
  using Layer = std::map<Places, Way>;

  static void add(Layer& layer, const Places& places, int count, uint16_t group) {
    const auto [at, is_new] = layer.try_emplace(places, Way{count, group});
    if (!is_new) at->second.count = 2;
  }

  bool fits(size_t parameter, size_t group, uint32_t place) const {
    if (place >= groups_[group].size()) return false;
    const NamedShape& one = model_[parameter];
    if (const auto& shape = groups_[group][place]; shape && *shape != one.shape) return false;
    if (!hugging_face_) return true;
    if (has_no_decay(one.name)) return group == 1;
    return one.shape.size() < 2 || group == 0;  // a vector may be of a LayerNorm of another name
  }

  NamedGroups walk_back(Places places) const {
    NamedGroups out;
    for (const GroupShapes& group : groups_) out.members.emplace_back(group.size());
    for (size_t i = model_.size(); i-- > 0;) {
      const uint16_t group = layers_[i + 1].at(places).group;
      if (group == kSkipped) continue;
      out.members[group][--places[group]] = i;
    }
    return out;
  }

  static NamedGroups fail(std::string why) { return {.members = {}, .why_not = std::move(why)}; }

  const std::vector<NamedShape>& model_;
  const std::vector<GroupShapes>& groups_;
  bool hugging_face_;
  size_t places_ = 0;
  std::vector<Layer> layers_;  // after each number of parameters
};

NamedGroups name_by_shape(const std::vector<NamedShape>& model, const std::vector<GroupShapes>& groups) {
  std::map<Shape, std::vector<size_t>> by_shape;
  for (size_t i = 0; i < model.size(); ++i) by_shape[model[i].shape].push_back(i);
  std::map<Shape, int> uses;
  NamedGroups out;
  for (const GroupShapes& group : groups) {
    out.members.emplace_back();
    for (const auto& shape : group) {
      if (!shape) return {.members = {}, .why_not = "a parameter has no state that says its shape"};
      const auto found = by_shape.find(*shape);
      if (found == by_shape.end())
        return {.members = {}, .why_not = str("no parameter has the shape ", describe_shape(*shape))};
      if (found->second.size() > 1 || ++uses[*shape] > 1)
        return {.members = {}, .why_not = str("several parameters have the shape ", describe_shape(*shape))};
      out.members.back().push_back(found->second.front());
    }
  }
  return out;
}

}  // namespace

NamedGroups name_groups(const std::vector<NamedShape>& model, const std::vector<GroupShapes>& groups,
                        bool in_order, bool hugging_face) {
  return in_order ? Dealer(model, groups, hugging_face).deal() : name_by_shape(model, groups);
}

}  // namespace tessera::checkpoint

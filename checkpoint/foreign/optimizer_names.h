// Names for an optimizer's state that torch.optim has by number.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::checkpoint {

/// A parameter of the model, or an entry that may be one.
struct NamedShape {
  std::string name;
  std::vector<int64_t> shape;
};

/// A parameter of an optimizer's group; nullopt: its state does not say the shape.
using GroupShapes = std::vector<std::optional<std::vector<int64_t>>>;

struct NamedGroups {
  /// By group and place in it: an index in `model`. Empty: the names cannot be told.
  std::vector<std::vector<size_t>> members;
  std::string why_not;  ///< "several parameters have the shape [8]"
};

/// Assigns the model's parameters to the groups' places, so that shapes are the same. `in_order`: `model` is
/// in the model's order, in which each group has its parameters; else only a shape that there is once names
/// its parameter. `hugging_face`: the groups are those of the Hugging Face Trainer. Names are given only
/// where there is one way to give them: [Note: names of numbers] in optimizer_names.cc.
NamedGroups name_groups(const std::vector<NamedShape>& model, const std::vector<GroupShapes>& groups,
                        bool in_order, bool hugging_face);

}  // namespace tessera::checkpoint

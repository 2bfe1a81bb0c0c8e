// Blocks: the repeated submodules of a model, found by the names of its parameters. libtorch's C++ modules
// have no forward hooks; which block runs is known by the parameters that operators read.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tessera::activations {

struct NamedShape {
  std::string name;   ///< "blocks.0.norm1.weight"
  std::string shape;  ///< dtype and sizes, as text that is equal for equal ones
};

/// The block of each parameter, counted from 0; -1 where it is in none.
///
/// Without `is_block`, wherever names number their parts (as ModuleList and Sequential do: `blocks.0.`,
/// `blocks.1.`) and two of these have parameters of the same names and shapes, each numbered part is a block.
/// In lists inside of lists the outermost list counts. With `is_block`, the modules whose name it accepts are
/// the blocks.
std::vector<int> blocks_of(const std::vector<NamedShape>& parameters,
                           const std::function<bool(const std::string& module)>& is_block = nullptr);

}  // namespace tessera::activations

#include "activations/blocks.h"

#include <map>
#include <set>

#include "core/str.h"

namespace tessera::activations {
namespace {

bool is_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

/// The places in `name` where a part of it ends: "a.b.weight" has those of "a" and "a.b".
std::vector<size_t> part_ends(const std::string& name) {
  std::vector<size_t> ends;
  for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1))
    ends.push_back(dot);
  return ends;
}

/// Lists ("blocks", "encoder.layers"; "" is the model itself) of which two elements are alike.
std::set<std::string> repeating_lists(const std::vector<NamedShape>& parameters) {
  std::map<std::string, std::map<std::string, std::string>> elements;  // list -> element -> structure
  for (const NamedShape& parameter : parameters) {
    size_t begin = 0;
    for (const size_t end : part_ends(parameter.name)) {
      const std::string part = parameter.name.substr(begin, end - begin);
      if (is_number(part)) {
        const std::string list = begin == 0 ? "" : parameter.name.substr(0, begin - 1);
        elements[list][part] += str(parameter.name.substr(end), " ", parameter.shape, "\n");
      }
      begin = end + 1;
    }
  }
  std::set<std::string> lists;
  for (const auto& [list, structures] : elements) {
    std::set<std::string> kinds;
    for (const auto& [element, structure] : structures) kinds.insert(structure);
    if (kinds.size() < structures.size()) lists.insert(list);
  }
  return lists;
}

/// The name of the outermost block that the parameter is in, or "".
std::string block_name(const std::string& parameter, const std::set<std::string>& lists,
                       const std::function<bool(const std::string&)>& is_block) {
  size_t begin = 0;
  for (const size_t end : part_ends(parameter)) {
    const std::string module = parameter.substr(0, end);
    const std::string list = begin == 0 ? "" : parameter.substr(0, begin - 1);
    const bool listed = is_number(parameter.substr(begin, end - begin)) && lists.contains(list);
    if (listed || (is_block && is_block(module))) return module;
    begin = end + 1;
  }
  return "";
}

}  // namespace

std::vector<int> blocks_of(const std::vector<NamedShape>& parameters,
                           const std::function<bool(const std::string& module)>& is_block) {
  const std::set<std::string> lists = is_block ? std::set<std::string>() : repeating_lists(parameters);
  std::map<std::string, int> numbers;
  std::vector<int> blocks;
  for (const NamedShape& parameter : parameters) {
    const std::string name = block_name(parameter.name, lists, is_block);
    blocks.push_back(
        name.empty() ? -1 : numbers.try_emplace(name, static_cast<int>(numbers.size())).first->second);
  }
  return blocks;
}

}  // namespace tessera::activations

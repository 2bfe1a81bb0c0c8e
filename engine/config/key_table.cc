// KeyTable, and the rows of a section whose keys depend on a type.
#include <algorithm>

#include "core/check.h"
#include "engine/config/key.h"

namespace tessera::config {

std::vector<Key> merged_keys(const std::vector<std::pair<std::string, std::vector<Key>>>& types) {
  std::vector<Key> merged;
  for (const auto& [type, keys] : types) {
    auto place = merged.begin();  // rows of one type keep their order
    for (const Key& key : keys) {
      const auto equal = std::find_if(merged.begin(), merged.end(), [&](Key row) {
        row.for_types.clear();
        return row == key;
      });
      if (equal != merged.end()) {
        equal->for_types.push_back(type);
        place = equal + 1;
        continue;
      }
      const auto other =
          std::find_if(merged.rbegin(), merged.rend(), [&](const Key& row) { return row.path == key.path; });
      const bool is_first = other == merged.rend();
      place = merged.insert(is_first ? place : other.base(), key);
      place->for_types = {type};
      if (!is_first) place->aliases.clear();  // the first row of a path has them
      ++place;
    }
  }
  for (Key& key : merged)
    if (key.for_types.size() == types.size()) key.for_types.clear();
  return merged;
}

void KeyTable::add(Key key) {
  std::erase(key.aliases, key.path);  // a key of `trainer` may have the argument's name
  for (const Key& other : keys_)
    TESSERA_CHECK(other.path != key.path || (!other.for_types.empty() && !key.for_types.empty()),
                  "key declared twice: ", key.path);
  places_[key.parent()].push_back(keys_.size());
  keys_.push_back(std::move(key));
}
void KeyTable::add(const std::vector<Key>& keys) {
  for (const Key& key : keys) add(key);
}

const Key* KeyTable::find(const std::string& path, const std::string& type) const {
  const size_t dot = path.rfind('.');
  for (const Key* key : children(dot == std::string::npos ? "" : path.substr(0, dot), type))
    if (key->name() == path.substr(dot + 1)) return key;
  return nullptr;
}

const Key* KeyTable::find_any(const std::string& path) const {
  const auto found =
      std::find_if(keys_.begin(), keys_.end(), [&](const Key& key) { return key.path == path; });
  return found == keys_.end() ? nullptr : &*found;
}

std::vector<const Key*> KeyTable::children(const std::string& parent) const {
  std::vector<const Key*> found;
  if (const auto places = places_.find(parent); places != places_.end())
    for (const size_t place : places->second) found.push_back(&keys_[place]);
  if (parent.ends_with("[]"))
    for (const Key* key : children(find_any(parent.substr(0, parent.size() - 2))->items_like))
      if (key->per_group) found.push_back(key);
  return found;
}

std::vector<const Key*> KeyTable::children(const std::string& parent, const std::string& type) const {
  std::vector<const Key*> found = children(parent);
  std::erase_if(found, [&](const Key* key) { return !key->is_for(type); });
  return found;
}

std::vector<std::string> KeyTable::paths_named(const std::string& name) const {
  std::vector<std::string> paths;
  for (const Key& key : keys_)
    if (key.name() == name && std::find(paths.begin(), paths.end(), key.path) == paths.end())
      paths.push_back(key.path);
  return paths;
}

}  // namespace tessera::config

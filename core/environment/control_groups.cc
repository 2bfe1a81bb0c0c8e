#include "core/environment/control_groups.h"

#include <fstream>
#include <string>

#include "core/str.h"

namespace tessera {

namespace fs = std::filesystem;

std::optional<int64_t> ControlGroup::number(std::string_view file) const {
  std::ifstream in(folder / file);
  int64_t value = 0;
  return in >> value ? std::optional(value) : std::nullopt;
}

std::optional<int64_t> ControlGroup::number(std::string_view file, std::string_view name) const {
  std::ifstream in(folder / file);
  std::string key;
  for (int64_t value = 0; in >> key >> value;)
    if (key == name) return value;
  return std::nullopt;
}

std::vector<ControlGroup> control_groups(std::string_view controller, const fs::path& root) {
  std::vector<ControlGroup> groups;
  const fs::path mount = root / "sys/fs/cgroup";
  std::ifstream lines(root / "proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) {  // NUMBER:CONTROLLERS:/PATH
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = str(",", line.substr(first + 1, second - first - 1), ",");
    const bool is_version_2 = controllers == ",,";
    if (!is_version_2 && controllers.find(str(",", controller, ",")) == std::string::npos) continue;
    for (fs::path path = fs::path(line.substr(second + 1)).relative_path();; path = path.parent_path()) {
      groups.push_back({(is_version_2 ? mount : mount / controller) / path, is_version_2 ? 2 : 1});
      if (path.empty()) break;
    }
  }
  return groups;
}

}  // namespace tessera

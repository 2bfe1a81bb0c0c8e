// The control groups (cgroup version 1 and 2) that this process lies in, and the numbers in their files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

namespace tessera {

/// A group, as the files of one controller show it.
struct ControlGroup {
  std::filesystem::path folder;
  int version = 2;  ///< 1: the controller has files of its own, with other names

  /// The number that a file of the group begins with; nullopt: "max", or there is no such file.
  std::optional<int64_t> number(std::string_view file) const;
  /// The number behind `name` in a file of lines "NAME NUMBER".
  std::optional<int64_t> number(std::string_view file, std::string_view name) const;
};

/// The group of this process first, then those above it. A container may see its own group as the mount's
/// root, which is always the last one. Empty: the kernel shows none. `controller`: "memory", "cpu". `root`:
/// where proc/ and sys/ are; tests have their own.
/// Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/
std::vector<ControlGroup> control_groups(std::string_view controller,
                                         const std::filesystem::path& root = "/");

}  // namespace tessera

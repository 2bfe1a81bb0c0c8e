// Slurm's short forms of lists: hosts ("n[01-03,7],m2") and numbers of tasks a host ("2(x3),1").
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// The hosts of a list in Slurm's form, in its order: "n[01-03,7],m2" is n01, n02, n03, n7, m2.
/// Numbers keep their leading zeros; several brackets in one name vary the last one first. Throws ConfigError
/// with the text for an open bracket, a range that is not one, or more than 65,536 hosts.
std::vector<std::string> expand_host_list(std::string_view text);

/// The numbers of a list in Slurm's form: "2(x3),1" is 2, 2, 2, 1. Throws ConfigError with the text.
std::vector<int> expand_task_counts(std::string_view text);

}  // namespace tessera

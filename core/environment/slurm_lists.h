// Slurm's short forms of lists: hosts ("n[01-03,7],m2") and numbers of tasks a host ("2(x3),1").
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// The first host of a list in Slurm's form: of "n[01-03,7],m2" it is n01. Throws ConfigError with the text
/// where there is none.
std::string first_host(std::string_view text);

/// The numbers of a list in Slurm's form: "2(x3),1" is 2, 2, 2, 1. Throws ConfigError with the text.
std::vector<int> expand_task_counts(std::string_view text);

}  // namespace tessera

// The file of --env-file: environment variables of the ranks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::launcher {

/// Whether a shell can have a variable of this name: ASCII letters, digits and _, not first a digit.
bool is_variable_name(std::string_view text);

/// "NAME=value" lines, in order. Empty lines and those that begin with `#` are left out; the value is
/// all that follows the first `=`, as it is. Throws ConfigError with FILE:LINE for another line, a name that
/// is no variable's or one of those that the launcher sets, and one that stands there twice.
std::vector<std::string> read_env_file(const std::string& path);

}  // namespace tessera::launcher

// The file of --env-file: environment variables of the ranks.
#pragma once

#include <string>
#include <vector>

namespace tessera::launcher {

/// Local. "NAME=value" lines, in order. Empty lines and those that begin with `#` are left out; the value is
/// all that follows the first `=`, as it is. Throws ConfigError with FILE:LINE for another line, a name that
/// is no variable's, and one that stands there twice.
std::vector<std::string> read_env_file(const std::string& path);

}  // namespace tessera::launcher

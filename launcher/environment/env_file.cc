#include "launcher/environment/env_file.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <unordered_set>

#include "core/error.h"
#include "launcher/environment/environment.h"

namespace tessera::launcher {
bool is_variable_name(std::string_view text) {
  const auto fits = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; };
  return !text.empty() && std::isdigit(static_cast<unsigned char>(text[0])) == 0 &&
         std::all_of(text.begin(), text.end(), fits);
}

std::vector<std::string> read_env_file(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error))
    throw ConfigError("--env-file ", path, ": is a folder; expected a file of lines NAME=VALUE");
  std::ifstream file(path);
  if (!file) throw ConfigError("--env-file ", path, ": the file cannot be read");
  std::vector<std::string> variables;
  std::unordered_set<std::string> names;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.find_first_not_of(" \t") == line.npos || line.starts_with('#')) continue;
    const size_t equals = line.find('=');
    if (equals == line.npos || !is_variable_name(std::string_view(line).substr(0, equals)))
      throw ConfigError(path, ":", number, ": expected NAME=VALUE, with a name of letters, digits and _");
    if (line.find('\0') != line.npos)
      throw ConfigError(path, ":", number, ": has a NUL character; expected NAME=VALUE without");
    const std::string name = line.substr(0, equals);
    if (is_always_set(name) || name == "TESSERA_MEMORY_DIR")
      throw ConfigError(path, ":", number, ": ", name, " is set by the launcher; expected ",
                        name == "MASTER_ADDR"   ? "--master-addr"
                        : name == "MASTER_PORT" ? "--master-port"
                                                : "other variables");
    if (!names.insert(name).second) throw ConfigError(path, ":", number, ": ", name, " stands there twice");
    variables.push_back(line);
  }
  return variables;
}

}  // namespace tessera::launcher

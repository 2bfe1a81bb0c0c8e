#include "examples/torchscript/data/data_files.h"

#include <glob.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "core/error.h"

namespace tessera::examples {
namespace {

/// Sorted by bytes, since glob()'s order depends on the locale.
std::vector<std::string> matches_of(const std::string& pattern) {
  glob_t found{};
  const int result = ::glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found);
  std::vector<std::string> names;
  if (result == 0) names.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  if (result == GLOB_NOSPACE) throw DataError(pattern, ": matches more files than the memory has room for");
  std::sort(names.begin(), names.end());
  return names;
}

bool is_pattern(const std::string& name) {
  std::error_code error;
  return name.find_first_of("*?[") != std::string::npos && !std::filesystem::exists(name, error);
}

}  // namespace

std::vector<std::string> find_data_files(const std::vector<std::string>& names) {
  std::vector<std::string> files;
  for (const std::string& name : names) {
    if (!is_pattern(name)) {
      files.push_back(name);
      continue;
    }
    const std::vector<std::string> matches = matches_of(name);
    if (matches.empty()) throw DataError(name, ": no file matches this pattern; expected at least one");
    files.insert(files.end(), matches.begin(), matches.end());
  }
  std::set<std::string> known;
  for (const std::string& file : files)
    if (!known.insert(std::filesystem::path(file).lexically_normal().string()).second)
      throw DataError(file, ": is named twice; expected each file once");
  return files;
}

}  // namespace tessera::examples

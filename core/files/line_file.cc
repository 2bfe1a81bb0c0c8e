#include "core/files/line_file.h"

#include <cerrno>
#include <cstdint>
#include <sstream>
#include <vector>

#include "core/files/disk.h"
#include "core/str.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// "3, 5 to 9"; of many the first.
std::string describe_numbers(const std::vector<int64_t>& numbers) {
  constexpr size_t kShown = 10;
  std::vector<std::string> shown;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const size_t first = i;
    while (i + 1 < numbers.size() && numbers[i + 1] == numbers[i] + 1) ++i;
    if (shown.size() == kShown) {
      shown.push_back(str(numbers.size() - first, " more"));
      break;
    }
    shown.push_back(first == i ? str(numbers[i]) : str(numbers[first], " to ", numbers[i]));
  }
  return join(shown, ", ");
}

/// Writes `content` beside `path` under a name that is free, and returns that.
fs::path keep_aside(const fs::path& path, const std::string& content) {
  fs::path aside = path.string() + ".damaged";
  std::error_code error;
  for (int number = 2; fs::exists(fs::symlink_status(aside, error)); ++number)
    aside = str(path, ".damaged-", number);
  replace_file(aside, content);
  return aside;
}

}  // namespace

LineFile::LineFile(fs::path path, const Test& keep, const Test& readable) : path_(std::move(path)) {
  std::string kept;
  if (keep) {
    const std::string content = fs::exists(path_) ? InputFile(path_).read_all() : std::string();
    std::istringstream old(content);
    std::vector<int64_t> unreadable;
    int64_t number = 0;
    for (std::string line; std::getline(old, line);) {
      ++number;
      if (old.eof() || (readable && !readable(line)))  // a killed run may leave an incomplete last line
        unreadable.push_back(number);
      else if (keep(line))
        kept += line + "\n";
    }
    if (readable && !unreadable.empty())
      damage_ = str(path_, ": ", unreadable.size(), " of its ", number, " lines cannot be read (",
                    unreadable.size() == 1 ? "line " : "lines ", describe_numbers(unreadable),
                    ") and are left out; the file as it was is ", keep_aside(path_, content).string());
  }
  is_new_ = kept.empty();
  replace_file(path_, kept);
  errno = 0;
  out_.open(path_, std::ios::app | std::ios::binary);
  if (!out_) throw DiskError(path_, " cannot be written: ", describe_errno(errno));
}

void LineFile::append(const std::string& line) {
  errno = 0;
  out_ << line + "\n" << std::flush;
  if (!out_) throw DiskError(path_, " cannot be written: ", describe_errno(errno));
}

}  // namespace tessera

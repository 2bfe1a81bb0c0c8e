#include "core/line_file.h"

#include <cerrno>
#include <sstream>

#include "core/disk.h"
#include "core/str.h"

namespace tessera {

LineFile::LineFile(std::filesystem::path path, const std::function<bool(const std::string& line)>& keep)
    : path_(std::move(path)) {
  std::string kept;
  if (keep) {
    std::istringstream old(std::filesystem::exists(path_) ? InputFile(path_).read_all() : std::string());
    for (std::string line; std::getline(old, line);)
      if (!old.eof() && keep(line)) kept += line + "\n";  // a killed run may leave an incomplete last line
  }
  is_new_ = kept.empty();
  replace_file(path_, kept);
  errno = 0;
  out_.open(path_, std::ios::app | std::ios::binary);
  if (!out_) throw DiskError(str(path_.string(), " cannot be written: ", describe_errno(errno)));
}

void LineFile::append(const std::string& line) {
  errno = 0;
  out_ << line + "\n" << std::flush;
  if (!out_) throw DiskError(str(path_.string(), " cannot be written: ", describe_errno(errno)));
}

}  // namespace tessera

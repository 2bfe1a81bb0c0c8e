#include "core/files/temporary_folder.h"

#include <stdlib.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace tessera {

namespace fs = std::filesystem;

TemporaryFolder::TemporaryFolder(const std::string& prefix, fs::path parent) {
  std::error_code error;
  if (parent.empty()) parent = fs::temp_directory_path(error);
  if (error) parent = "/tmp";
  parent =
      fs::absolute(parent, error);  // other processes get its name, which may have another working folder
  std::string name = (parent / (prefix + "_XXXXXX")).string();
  if (!::mkdtemp(name.data()))
    throw Error(name, ": a temporary folder cannot be made: ", std::strerror(errno));
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  if (!kept_) fs::remove_all(path_, ignored);
}

}  // namespace tessera

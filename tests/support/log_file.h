// A log that a test can read.
#pragma once

#include <filesystem>
#include <string>

#include "core/files/temporary_folder.h"
#include "core/log.h"
#include "tests/support/files.h"

namespace tessera {

/// Owns a log file, removed on destruction.
class LogFile {
 public:
  Logger logger() const { return Logger({.terminal = false, .file = path_.string()}); }
  std::string text() const { return read_text(path_); }

 private:
  const TemporaryFolder folder_{"log"};
  const std::filesystem::path path_ = folder_.path() / "log";
};

}  // namespace tessera

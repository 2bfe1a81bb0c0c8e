// RunLock: a lock file that lets only one run at a time use an output folder.
#pragma once

#include <filesystem>
#include <string>

#include "core/files/file_descriptor.h"

namespace tessera::train {

/// Keeps other runs out of a folder. Owns OUTPUT_DIR/.lock and an flock(2) on it, which the kernel releases
/// when the process ends. The file names the process that holds it. The destructor removes it; a file left by
/// a killed process does no harm. Not thread-safe.
class RunLock {
 public:
  /// Takes the lock of an existing folder. Throws ConfigError naming the process and host that hold
  /// it.
  explicit RunLock(const std::filesystem::path& folder);
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;
  ~RunLock();

  /// Why there is no lock, if the file system does not support any (some network file systems); else
  /// empty.
  const std::string& missing() const { return missing_; }

 private:
  std::filesystem::path path_;
  FileDescriptor file_;
  std::string missing_;
};

/// Throws ConfigError, as RunLock, if another process holds the lock of this folder, which need not
/// exist. Changes nothing.
void check_not_in_use(const std::filesystem::path& folder);

}  // namespace tessera::train

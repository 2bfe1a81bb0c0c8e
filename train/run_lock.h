// RunLock: one run at a time in an output folder.
#pragma once

#include <filesystem>
#include <string>

#include "core/file_descriptor.h"

namespace tessera::train {

/// Owns OUTPUT_DIR/.lock, an flock(2) that ends with the process, however it ends. The file
/// says who holds it, and is removed by the destructor; one that a killed process has left
/// stands in nobody's way. Not thread-safe.
class RunLock {
 public:
  /// Local. Takes the lock of this folder, which exists. Throws ConfigError naming
  /// the process and the host that have it.
  explicit RunLock(const std::filesystem::path& folder);
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;
  ~RunLock();

  /// Local. Why there is no lock, where the file system has none (some network file systems); else empty.
  const std::string& missing() const { return missing_; }

 private:
  std::filesystem::path path_;
  FileDescriptor file_;
  std::string missing_;
};

/// Local. Throws ConfigError as RunLock does while a run has the lock of this folder,
/// which need not exist. Changes nothing.
void check_not_in_use(const std::filesystem::path& folder);

}  // namespace tessera::train

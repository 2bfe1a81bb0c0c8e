// MemoryFolder: a folder in memory that outlives the ranks of an attempt, for what a restart continues from.
#pragma once

#include <string>

#include "core/files/temporary_folder.h"
#include "launcher/process/guard.h"

namespace tessera::launcher {

/// Makes a folder in memory for one run. Owns a new folder in /dev/shm, which only this user can read, and
/// removes it with its contents; if the launcher is killed, a guard of its own does.
class MemoryFolder {
 public:
  /// Throws Error, CommError.
  MemoryFolder();
  std::string path() const { return folder_.path().string(); }

 private:
  TemporaryFolder folder_;
  Guard guard_;
};

}  // namespace tessera::launcher

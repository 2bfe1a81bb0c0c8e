// RunFiles: the paths of a run's files on this host.
#pragma once

#include <filesystem>
#include <string>

#include "core/files/file_descriptor.h"
#include "core/files/temporary_folder.h"

namespace tessera::launcher {

/// Makes the files of one run. Owns a temporary folder, which is removed unless keep() was called.
class RunFiles {
 public:
  /// `log_dir`: the folder of the logs, made if it is missing; empty: the temporary one. After
  /// restarts its folder attempt_N is used instead. Throws ConfigError if it cannot be made.
  explicit RunFiles(const std::string& log_dir, int restart_count = 0);

  /// What is removed.
  std::string temporary() const { return temporary_.path().string(); }
  /// Keeps the logs for the user to read.
  void keep();
  std::string log(int rank) const;
  /// Where a rank that has no log writes, if not to this process's own output.
  std::string output(int rank) const;
  std::string errors(int rank) const;
  std::string error(int rank) const;

 private:
  TemporaryFolder temporary_{"tessera"};
  std::filesystem::path log_dir_;
};

/// Opens a file, which programs that are started do not inherit. Throws ConfigError with the reason.
FileDescriptor open_file(const std::string& path, int flags);

}  // namespace tessera::launcher

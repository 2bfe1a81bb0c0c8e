// Runs the launcher as a separate process, with a folder for its ranks' files.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

#include "core/files/temporary_folder.h"

namespace tessera::launcher::testing {

/// Seconds that nothing takes.
inline constexpr double kHangs = 120;

/// Owns a temporary folder.
class Folder {
 public:
  std::string path(const std::string& name = "") const {
    return (name.empty() ? folder_.path() : folder_.path() / name).string();
  }
  bool has(const std::string& name) const { return std::filesystem::exists(path(name)); }
  std::string read(const std::string& name) const;
  /// Waits for NAME_0 to NAME_(count-1); false when kHangs passes first.
  bool wait_for(const std::string& name, int count) const;
  /// The processes named in all files pid_*.
  std::vector<pid_t> pids() const;

 private:
  TemporaryFolder folder_{"launcher_test"};
};

/// Waits until none of these processes runs (zombies do not count); false when kHangs passes first.
bool all_gone(const std::vector<pid_t>& pids);

/// A running launcher_test_tool; its stdout and stderr go to `folder`'s tool.out and tool.err. Killed if
/// still there at the end.
class Tool {
 public:
  Tool(const Folder& folder, const std::vector<std::string>& args,
       const std::vector<std::string>& environment = {}, const std::string& stdin_path = "/dev/null");
  Tool(const Tool&) = delete;
  Tool& operator=(const Tool&) = delete;
  ~Tool();
  void signal(int signal) const;
  /// Waits for the end. Returns the exit code, 1000 + signal, or -1 after `seconds`.
  int wait(double seconds = kHangs);

 private:
  pid_t pid_ = -1;
};

/// "launch -n N -- test_rank FOLDER ACTION...", the arguments of most tests.
std::vector<std::string> launch_args(const Folder& folder, int nproc, const std::vector<std::string>& action,
                                     const std::vector<std::string>& flags = {});

}  // namespace tessera::launcher::testing

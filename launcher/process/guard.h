// Guard: a small process that cleans up if the launcher is killed with SIGKILL: it kills the ranks' children,
// and removes the run's folders.
#pragma once

#include <sys/types.h>

#include <string>

#include "core/files/file_descriptor.h"

namespace tessera::launcher {

// Who cleans up after SIGKILL.
// The kernel kills each rank when the launcher dies (PR_SET_PDEATHSIG), but not the children of the ranks.
// The guard knows the ranks' process groups. It waits on a socket whose other end only the launcher holds,
// and kills the groups when that end closes. It is a fork without exec, which needs no executable file, a few
// hundred KB and about a millisecond.

/// Ends the ranks when the launcher is killed. Owns the guard process and the launcher's end of its socket.
/// The destructor ends the guard, which kills the groups it still watches. Where somebody kills the guard,
/// the run goes on without. Not thread-safe.
class Guard {
 public:
  /// Throws CommError if the process cannot be created.
  Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  ~Guard();

  /// The group will be killed when the launcher ends. At most kMaxRanks groups at a time.
  void watch(pid_t group);
  /// Stops watching a group that has ended, whose number other processes may get.
  void forget(pid_t group);
  enum class Folder { kMemory, kFiles };
  /// The folder and all in it will be removed if the launcher ends without the destructor. It takes the place
  /// of the one of this kind before. `path`: absolute, of at most kMaxPath bytes.
  void remove_if_killed(Folder which, const std::string& path);

  static constexpr size_t kMaxPath = 4095;

 private:
  void send(pid_t message);
  FileDescriptor socket_;
  pid_t pid_ = -1;
};

}  // namespace tessera::launcher

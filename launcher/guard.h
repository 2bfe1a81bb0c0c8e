// Guard: a small process that outlives a launcher killed with SIGKILL, to kill what the ranks had started.
#pragma once

#include <sys/types.h>

#include "core/file_descriptor.h"

namespace tessera::launcher {

// [Note: who cleans up after SIGKILL]
// The kernel kills each rank when the launcher dies (PR_SET_PDEATHSIG), but not the children of
// ranks. The guard knows the ranks' process groups, sleeps on a socket whose other end only the
// launcher holds, and kills the groups when that end closes. It is a fork without exec: no file to
// find, a few hundred KB, about a millisecond.

/// Owns the guard process and the launcher's end of its socket. Not thread-safe. Destroying it ends the
/// guard, which kills the groups it still watches.
class Guard {
 public:
  /// Local. Throws CommError when the process cannot be made.
  Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  ~Guard();

  /// Local. From now on the group ends with the launcher. At most kMaxRanks groups at a time.
  void watch(pid_t group);
  /// Local. The group has ended: its number may belong to others from now on.
  void forget(pid_t group);

 private:
  void send(pid_t message);
  FileDescriptor socket_;
  pid_t pid_ = -1;
};

}  // namespace tessera::launcher

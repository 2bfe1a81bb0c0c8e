// RemoteFolders: a folder in memory on each host of a run over ssh, for what a restart continues from. They
// outlive the launchers on the hosts, which live for one attempt.
#pragma once

#include <signal.h>

#include <string>
#include <vector>

#include "launcher/cluster.h"
#include "launcher/process/process.h"

namespace tessera::launcher {

/// Makes a folder on each host for the time of a run. Owns an ssh to each host, whose shell makes the folder
/// and removes it when its standard input ends: at the end of the run, when this process is killed, or when
/// the connection is lost. Used by one thread.
class RemoteFolders {
 public:
  /// Nothing is made unless the run is over ssh and may be restarted. `mask`: the signal mask of ssh.
  RemoteFolders(const ClusterOptions& options, const sigset_t& mask);
  /// Waits, for up to 5 s, until the folders are removed.
  ~RemoteFolders();
  RemoteFolders(const RemoteFolders&) = delete;
  RemoteFolders& operator=(const RemoteFolders&) = delete;

  /// Makes the folders, and another in place of each whose ssh has ended: its host may have come back.
  /// Does not wait for them. By host: where its folder is; empty: there are none. A host on which the folder
  /// cannot be made has none.
  const std::vector<std::string>& make();
  /// The host may be gone, which its ssh may not have noticed: one that does not answer within 5 s is
  /// ended.
  void check(size_t host);

 private:
  struct Keeper;
  EngineCommand command_for(size_t host) const;

  const ClusterOptions& options_;
  const sigset_t mask_;
  std::vector<std::string> paths_;
  std::vector<Keeper> keepers_;  // by host
};

}  // namespace tessera::launcher

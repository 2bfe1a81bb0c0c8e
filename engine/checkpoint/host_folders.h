// HostFolders: checkpoints in memory. Each host has a folder of its own, and the folders are used as one.
//
// Copies on another host.
// Each rank's file lies in the folder of its host. Hosts are partners in the order of their ranks, two by
// two, the last three of an odd number. After a save, partners send each other their files, and only then the
// checkpoint before is removed. So there are two copies of each file, on two hosts, of one checkpoint at
// least: when a host is lost, its partner's folder has what was in its own. (Zheng, Shi, Kalé: FTC-Charm++,
// an in-memory checkpoint-based fault tolerant runtime, 2004: "double in-memory checkpointing".) After a
// restart without that host there are two again with the next save.
//
// A crash can leave a new checkpoint on some hosts only, or cut off. find() compares every byte with its
// hash, and takes the latest checkpoint of which each file is whole in one folder at least. bring() then
// sends the files that hosts are to read and do not have, and release() removes them after the load.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/control/hosts.h"
#include "core/files/disk.h"

namespace tessera {

/// Sends the files of checkpoints in memory to other hosts, and brings them back. Owns the group over which
/// copies are sent; the folders are the launchers'. Used by one thread.
class HostFolders {
 public:
  /// Collective. `mine`: the folder of this host, an absolute path; whoever starts the ranks makes it, and
  /// has up to 5 s after them. Ranks with the same folder are those of a host.
  /// Returns nullptr if `mine` is empty on any rank. Throws CheckpointError, the same on all ranks, if a
  /// folder is another user's or others may write to it.
  static std::unique_ptr<HostFolders> join(comm::CommunicatorPtr comm, const std::filesystem::path& mine);

  const std::filesystem::path& path() const { return mine_; }
  int num_hosts() const { return hosts_.num_hosts(); }
  /// The rank that publishes checkpoints in the folder of `rank`: the first one of its host.
  int owner_of(int rank) const { return owners_[hosts_.host_of(rank)]; }
  bool owns() const { return owner_of(comm_->rank()) == comm_->rank(); }

  /// Collective, after a save in which this rank has written the file of number `file`: sends the partners'
  /// hosts their copies. Throws CheckpointError, the same on all ranks.
  void copy(const std::string& tag, int file);
  /// Is called after a save or load that failed on all ranks. Removes the checkpoint from this host.
  void discard(const std::string& tag) const;

  struct Found {
    std::string tag;       ///< empty: there is none
    nlohmann::json state;  ///< of the manifest
    std::string problem;   ///< why another one is not used, which is later or may be; empty: there is none
  };
  /// Collective. The checkpoint for whose state `order` gives the largest number, of those with whole files;
  /// nullopt: not to be used. All hosts then have its manifest. Throws CheckpointError, the same on all
  /// ranks.
  Found find(const std::function<std::optional<int64_t>(const nlohmann::json& state)>& order);
  /// Collective, after find(). Afterwards this host has the files of these numbers of the checkpoint found.
  /// Throws CheckpointError, the same on all ranks.
  void bring(const std::vector<int>& files);
  /// Is called when all ranks have read what bring() has brought, or failed. Removes it; the next save would
  /// otherwise keep it until that save is done.
  void release();

 private:
  HostFolders(comm::CommunicatorPtr comm, std::filesystem::path mine, comm::Hosts hosts);
  std::vector<int> partners() const;
  std::vector<std::vector<bool>> missing(const std::vector<int>& files) const;
  int host() const { return hosts_.host_of(comm_->rank()); }

  // The latter two are made when first used, and kept: one that goes while a failure of all ranks unwinds,
  // with which they go on, would leave the whole run.
  comm::CommunicatorPtr comm_, partners_, senders_;
  std::filesystem::path mine_;
  Disk disk_;
  comm::Hosts hosts_;
  std::vector<int> owners_;  // by host

  // The members below are about the checkpoint found.
  std::string tag_;
  std::vector<std::vector<bool>> has_;  // by host and file: whether it is there, whole
  std::vector<std::filesystem::path> brought_;
};

}  // namespace tessera

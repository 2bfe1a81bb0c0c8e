// save(): writes a checkpoint atomically: after a crash at any moment it is whole or absent.
//
// 1. Ranks agree on what is saved; rank 0 removes leftovers of interrupted saves and creates
//    DIR/TAG.tmp-XXXXXXXXXXXXXXXX/.
// 2. Each rank writes and syncs its file there, rank 0 also model.h5; ranks exchange {ok or the error}. An
//    error on any rank ends the save on all of them, and rank 0 removes the folder.
// 3. Rank 0 writes the manifest, syncs the folder, renames it to DIR/TAG (exchanging it with one that
//    exists), syncs DIR, and replaces DIR/latest, which is the commit (with SaveRequest::latest = false the
//    rename is). If one of these fails, the ones before are undone. Ranks learn the outcome. A replaced
//    checkpoint is removed last.
// At any moment `latest` names a whole checkpoint: the previous one or the new one.
//
// A folder on each host.
// In memory each host has a folder of its own (engine/checkpoint/host_folders.h). Then one rank of each host,
// the folder's owner, does what rank 0 does to the folder: it creates and publishes it, with the same
// manifest, which names the files of all hosts. Here there is no commit in one step: a crash can leave the
// new checkpoint on some hosts and the previous one on all.
//
// Saves of other tags may go on in the directory: step 1 leaves the temporary folder of another one, which is
// locked. Where the file system has no locks that all its hosts see, as NFS, there may be only one save at
// a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/sharded/checkpoint_files.h"
#include "core/files/disk.h"
#include "zero/plan/layout.h"

namespace tessera::checkpoint {

/// Collective. All-gathers strings: returns every rank's, in rank order. save() lets its exceptions pass.
using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;

struct SaveRequest {
  /// Is on a file system that all ranks share, or has owners; created if absent.
  std::filesystem::path directory;
  std::string tag;  ///< a folder's name, such as "global_step1200"
  int rank = 0;     ///< of the file that this process writes; 0 writes what there is once
  /// Has what messages call the rank, by that number. Empty: the same number.
  std::vector<int> writers = {};
  /// Has the number of the owner of the folder that the file is written to, by that number. The owner has the
  /// same directory and is its own owner. The list is equal on all ranks. Empty: 0, the one folder's.
  std::vector<int> owners = {};
  int stage = 0;                         ///< recorded for information
  const zero::Layout* layout = nullptr;  ///< equal on all ranks, as are tag, stage and state_names
  std::vector<std::string> state_names;
  std::vector<UnitData> units;       ///< by unit that is saved; this rank's slices, at every stage
  std::vector<WholeTensor> tensors;  ///< rank 0's are written
  std::vector<Blob> blobs;           ///< each rank's own; names may differ between ranks
  nlohmann::json state = nlohmann::json::object();  ///< rank 0's is written
  bool create = true;                               ///< false: a directory that is not there is an error
  bool latest = true;                               ///< false: DIR/latest stays as it is
  bool exclude_frozen = false;  ///< units that are not trainable are neither recorded nor in `units`
  DiskOptions disk;
};

struct SaveResult {
  std::filesystem::path path;  ///< DIR/TAG
  std::string warning;  ///< a folder's owner: what could not be cleaned up after the commit; else empty
};

/// Collective (three exchanges). The memory the request refers to must not change until it returns. Throws
/// CheckpointError naming rank and reason, the same on all ranks; files and checkpoints are then as before. A
/// checkpoint of that tag is replaced; other files of its folder stay (as hard links). What lies there and is
/// none is an error.
SaveResult save(const SaveRequest& request, const Exchange& exchange);

// The last part of a save, on rank 0, or of a conversion: renames a finished folder to DIR/TAG and updates
// the files that name it, as `latest`, or changes nothing.

struct Publication {
  std::filesystem::path directory;
  std::string tag;
  std::string temporary;  ///< name of the finished, synced folder within `directory`
  /// Files of `directory` that name it from now on, and what they hold then.
  std::vector<std::pair<std::string, std::string>> pointers;
};

/// The folders that create_directories(directory) would create, innermost first.
std::vector<std::filesystem::path> missing_folders(const std::filesystem::path& directory);

/// Renames the folder and replaces the pointers; when it returns, the checkpoint is
/// committed, and a replaced checkpoint has the folder's old name. On an error it undoes its changes, so that
/// the folder has its old name again, and throws CheckpointError.
void publish(const Publication& publication, const Disk& disk);

}  // namespace tessera::checkpoint

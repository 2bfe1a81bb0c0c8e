// save(): writes a checkpoint that is whole or absent, whatever happens on the way.
//
// [Note: commit protocol]
// 1. Ranks agree on what is saved; rank 0 removes what dead saves left behind and makes
// DIR/TAG.tmp-XXXXXXXXXXXXXXXX/.
// 2. Each rank writes and syncs its file there, rank 0 model.h5 too; ranks exchange {ok or the error}. An
// error on any
//    rank ends the save on all of them, and rank 0 removes the folder.
// 3. Rank 0 writes the manifest, syncs the folder, renames it to DIR/TAG (exchanging it with one that is
// there), syncs
//    DIR, and replaces DIR/latest: the moment the checkpoint counts. Should one of these fail, those before
//    are undone. Ranks learn the outcome. An exchanged older checkpoint is removed last.
// Killed at any moment, `latest` names a whole checkpoint: the previous one or the new one.
//
// One save at a time a directory: another one's temporary folder would be taken for a dead save's.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/shard_file.h"
#include "core/disk.h"
#include "zero/layout.h"

namespace tessera::checkpoint {

/// Collective. Gives every rank's string to all ranks, in rank order. What it throws, save() passes on.
using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;

struct SaveRequest {
  std::filesystem::path directory;  ///< on a file system all ranks share; made if absent
  std::string tag;                  ///< a folder's name, such as "global_step1200"
  int rank = 0;
  int stage = 0;                         ///< recorded; nothing depends on it
  const zero::Layout* layout = nullptr;  ///< equal on all ranks, as are tag, stage and state_names
  std::vector<std::string> state_names;
  std::vector<UnitData> units;                      ///< by unit; this rank's slices, at every stage
  std::vector<WholeTensor> tensors;                 ///< rank 0's are written
  std::vector<Blob> blobs;                          ///< each rank's own; names may differ
  nlohmann::json state = nlohmann::json::object();  ///< rank 0's is written
  bool replace = true;                              ///< false: a tag that exists is an error
  DiskOptions disk;
};

struct SaveResult {
  std::filesystem::path path;  ///< DIR/TAG
  int64_t rank_bytes = 0;      ///< this rank's file
  int64_t total_bytes = 0;     ///< all files
  std::string warning;  ///< rank 0: what could not be tidied up after the checkpoint was complete; else empty
};

/// Collective (three exchanges). All memory the request refers to must stay as it is until it
/// returns. Throws CheckpointError naming rank and reason, the same on all ranks: nothing is left
/// behind and what was there before is intact.
SaveResult save(const SaveRequest& request, const Exchange& exchange);

}  // namespace tessera::checkpoint

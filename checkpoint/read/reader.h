// Checkpoint: a checkpoint of Tessera's or of another program's, opened.
//
// A run removes its old checkpoints, and whoever reads one may not be allowed to lock it. So a reader opens
// all files first: what is open stays readable when it is removed. A reader that comes too late, or whose
// file system does not keep removed files (NFS, from another host), takes the checkpoint that `latest` names
// by then (LatestCheckpoint), and says so.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "checkpoint/foreign/foreign_checkpoint.h"
#include "checkpoint/read/element_source.h"
#include "checkpoint/sharded/manifest.h"

namespace tessera::checkpoint {

/// DIR/TAG; an empty tag means the one in `latest`. Throws CheckpointError when directory, `latest` or
/// tag does not exist; the message lists the tags that do.
std::filesystem::path find_checkpoint(const std::filesystem::path& directory, const std::string& tag);

/// A checkpoint as Checkpoint::open() takes it.
struct FoundCheckpoint {
  std::filesystem::path directory;
  std::string tag;  ///< empty: `directory` is the checkpoint of another program itself
};
/// Chooses what Checkpoint::open() would open: a checkpoint of Tessera's in the directory, else one that
/// another program has saved there. Throws CheckpointError where there is neither.
FoundCheckpoint choose_checkpoint(const std::filesystem::path& directory, const std::string& tag);

/// Whether open() would read what another program has saved, as far as names say. Throws as identify().
bool is_another_programs(const std::filesystem::path& directory, const std::string& tag);

/// Reads and checks `folder`/manifest.json only. Throws CheckpointError, also when the folder was
/// renamed: its name must be the tag in the manifest.
Manifest read_manifest(const std::filesystem::path& folder);

/// Device and inode: another one of the same name has others.
using FolderIdentity = std::pair<dev_t, ino_t>;

/// Opens a checkpoint that its run may remove while it is read. Not thread-safe.
class LatestCheckpoint {
 public:
  /// `tag`: the one to be read; empty: the one that `latest` names. Throws CheckpointError.
  LatestCheckpoint(std::filesystem::path directory, const std::string& tag);

  const std::string& tag() const { return tag_; }
  /// Is called after reading it failed. If its folder was removed or replaced meanwhile, and no tag was
  /// given: moves on to the one that `latest` names now. Returns what happened, one line for the user. Empty:
  /// the failure has another reason, or this has happened too often.
  std::string move_on();

 private:
  std::filesystem::path directory_;
  std::string tag_;
  bool is_given_;
  std::optional<FolderIdentity> identity_;
  int num_moves_ = 0;
};

/// Calls `read` with the tag of a checkpoint (of another program's with `tag`); anew with the next one if
/// this one is removed meanwhile, after `say` with what happened. Throws what `read` throws, and
/// CheckpointError.
void read_latest_checkpoint(const std::filesystem::path& directory, const std::string& tag,
                            const std::function<void(const std::string& line)>& say,
                            const std::function<void(const std::string& tag)>& read);

/// Says what a checkpoint has, and reads it. Owns the manifest and the open files. Logically immutable;
/// thread-safe.
class Checkpoint {
 public:
  /// Reads the manifest and opens the files, up to 500 of them; checks
  /// that the ranks' files exist and have their saved lengths. Where the directory has no checkpoint of
  /// Tessera's: reads what another program has saved there (checkpoint/foreign/foreign_checkpoint.h), as a
  /// manifest of one rank. `order`: see read_foreign(). Throws CheckpointError.
  static Checkpoint open(const std::filesystem::path& directory, const std::string& tag = "",
                         const ParameterOrder& order = {});
  /// The same without the check, for ElementSource::verify().
  static Checkpoint open_damaged(const std::filesystem::path& directory, const std::string& tag);
  /// Reads the manifest: files are opened when they are read, and may come until then.
  static Checkpoint open_part(const std::filesystem::path& directory, const std::string& tag);

  const Manifest& manifest() const { return *manifest_; }
  const std::filesystem::path& path() const { return path_; }  ///< DIR/TAG
  const ElementSource& elements() const { return *elements_; }
  /// What another program has saved; null: it is Tessera's. Then there is one rank, without hashes.
  const ForeignCheckpoint* foreign() const { return foreign_; }

 private:
  Checkpoint() = default;
  static std::optional<Checkpoint> open_another_programs(const std::filesystem::path& directory,
                                                         const std::string& tag, const ParameterOrder& order);
  /// `num_open`: files that are opened now. `sizes`: they are checked.
  static Checkpoint open_ours(const std::filesystem::path& directory, const std::string& tag, int num_open,
                              bool sizes);

  std::filesystem::path path_;
  std::shared_ptr<const Manifest> manifest_;
  std::unique_ptr<const ElementSource> elements_;
  const ForeignCheckpoint* foreign_ = nullptr;  // of elements_
};

/// Verifies all of DIR/TAG. Throws CheckpointError when the manifest is missing or invalid.
VerifyReport verify(const std::filesystem::path& directory, const std::string& tag);

}  // namespace tessera::checkpoint

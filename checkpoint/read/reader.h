// Checkpoint: reads and verifies a checkpoint's data. Needs no HDF5: the manifest has all offsets.
//
// A run removes its old checkpoints, and whoever reads one may not be allowed to lock it. So a reader opens
// all files first: what is open stays readable when it is removed. A reader that comes too late, or whose
// file system does not keep removed files (NFS, from another host), takes the checkpoint that `latest` names
// by then (LatestCheckpoint), and says so.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/foreign/foreign_checkpoint.h"
#include "checkpoint/manifest/manifest.h"
#include "core/files/disk.h"

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

/// Whether open() would read what another program has saved. Throws CheckpointError where that is damaged.
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

/// Reads and verifies a checkpoint's data. Owns the manifest and the open files. Logically immutable;
/// thread-safe.
class Checkpoint {
 public:
  /// Reads the manifest and opens the files, up to 500 of them; checks
  /// that the ranks' files exist and have their saved lengths. Where the directory has no checkpoint of
  /// Tessera's: reads what another program has saved there (checkpoint/foreign/foreign_checkpoint.h), as a
  /// manifest of one rank. `order`: see read_foreign(). Throws CheckpointError.
  static Checkpoint open(const std::filesystem::path& directory, const std::string& tag = "",
                         const ParameterOrder& order = {});
  /// The same without the check, for verify().
  static Checkpoint open_damaged(const std::filesystem::path& directory, const std::string& tag = "");
  /// Reads the manifest: files are opened when they are read, and may come until then.
  static Checkpoint open_part(const std::filesystem::path& directory, const std::string& tag);
  Checkpoint(Checkpoint&&) noexcept;
  ~Checkpoint();

  const Manifest& manifest() const;
  const std::filesystem::path& path() const;  ///< DIR/TAG
  /// What another program has saved; null: it is Tessera's. Then there is one rank, without hashes.
  const ForeignCheckpoint* foreign() const;

  /// Fills `destination` from byte `begin` of a dataset in the file of `rank`. Every block touched is
  /// read whole and verified. Throws CheckpointError naming file, block and dataset; `destination` is then
  /// undefined. Reading ranges in file order reads each block once.
  void read(int rank, const DatasetRecord& dataset, int64_t begin, std::span<std::byte> destination) const;
  /// Reads and verifies the blocks that read() would read, each once in the lifetime of this object,
  /// and discards the data. Throws as read() does.
  void check(int rank, const DatasetRecord& dataset, int64_t begin, int64_t bytes) const;
  /// A whole tensor's or blob's bytes.
  std::vector<std::byte> read_all(int rank, const DatasetRecord& dataset) const;
  /// The dataset of that name; throws CheckpointError when the file has none.
  const DatasetRecord& dataset(int rank, const std::string& name) const;

  /// The file of this index of the manifest. Throws DiskError.
  const InputFile& file(int index) const;

  /// Bytes read from files since open(), without the manifest.
  int64_t bytes_read() const;

 private:
  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  static std::optional<Checkpoint> open_another_programs(const std::filesystem::path& directory,
                                                         const std::string& tag, const ParameterOrder& order);
  static Checkpoint open_all(const std::filesystem::path& directory, const std::string& tag);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint

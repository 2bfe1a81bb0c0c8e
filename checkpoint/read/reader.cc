#include "checkpoint/read/reader.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <optional>
#include <string_view>

#include "checkpoint/block_hashes.h"
#include "checkpoint/checkpoint_error.h"
#include "checkpoint/files/catalog.h"
#include "checkpoint/manifest/names.h"
#include "checkpoint/read/foreign_view.h"
#include "core/check.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string tags_there_are(const fs::path& directory) {
  const std::vector<std::string> tags = list_checkpoints(directory);
  return tags.empty() ? "it has no checkpoints" : "it has " + join(tags, ", ");
}

int64_t block_bytes(const FileRecord& file, int64_t block) {
  return std::min(kBlockBytes, file.bytes - block * kBlockBytes);
}

std::string describe_block(const FileRecord& file, int64_t block) {
  const int64_t begin = block * kBlockBytes;
  return str("block ", block, " (bytes ", begin, " to ", begin + block_bytes(file, block), ")");
}

/// nullopt: it is not there.
std::optional<FolderIdentity> folder_identity(const fs::path& folder) {
  struct stat status{};
  if (::stat(folder.c_str(), &status) != 0) return std::nullopt;
  return FolderIdentity{status.st_dev, status.st_ino};
}

/// Throws unless the folder has the name under which the checkpoint was saved.
void check_folder_name(const fs::path& folder, const std::string& tag) {
  std::error_code error;
  const fs::path name = folder.filename(),
                 target = fs::is_symlink(folder, error) ? fs::canonical(folder, error).filename() : name;
  if (name == tag || target == tag) return;
  throw CheckpointError(str(folder.string(), ": holds the checkpoint ", tag,
                            " under another name; to use it, give the folder its name back (mv ",
                            folder.string(), " ", (folder.parent_path() / tag).string(),
                            "), in another directory if there is a ", tag, " here"));
}

}  // namespace

fs::path find_checkpoint(const fs::path& directory, const std::string& tag) {
  std::error_code error;
  if (!fs::exists(directory, error))
    throw CheckpointError(str("no checkpoint directory ", directory.string()));
  if (!fs::is_directory(directory, error))
    throw CheckpointError(str(directory.string(),
                              ": is no checkpoint; expected a folder of them, or a whole file that "
                              "torch.save or safetensors has written"));
  std::string wanted = tag;
  if (tag.empty()) {
    std::optional<std::string> latest;
    try {
      latest = read_latest(directory);
    } catch (const CheckpointError& error) {
      throw CheckpointError(str(error.what(), "; ", tags_there_are(directory)));
    }
    if (!latest) {
      if (fs::exists(directory / kManifestName, error))
        throw CheckpointError(
            str(directory.string(),
                ": is a checkpoint itself; expected the directory it is in, and its name as the tag"));
      throw CheckpointError(str(directory.string(), ": has no file \"", kLatestName,
                                "\" that names a checkpoint; ", tags_there_are(directory)));
    }
    wanted = *latest;
  } else {
    check_tag(tag);
  }
  const fs::path folder = directory / wanted;
  if (!fs::is_directory(folder, error))
    throw CheckpointError(str(directory.string(), ": has no checkpoint ", wanted,
                              tag.empty() ? ", which \"latest\" names; " : "; ", tags_there_are(directory)));
  return folder;
}

namespace {

/// Whether a folder is, or was to be, a checkpoint of Tessera's.
bool is_tesseras(const fs::path& folder) {
  std::error_code error;
  return fs::exists(folder / kManifestName, error) || fs::exists(folder / rank_file_name(0), error);
}

/// Makes buffers of the parameters that the model has as such.
void take_buffers(ForeignCheckpoint& source, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const auto found = std::find_if(source.parameters.begin(), source.parameters.end(),
                                    [&](const ForeignParameter& one) { return one.name == name; });
    if (found == source.parameters.end() || !found->states.empty()) continue;
    source.buffers.emplace_back(name, std::move(found->weights));
    source.parameters.erase(found);
  }
}

}  // namespace

/// Whether names alone say that it is Tessera's, by the tag or by what else the directory has, or that
/// nothing is there. Else it is another program's, or nobody's.
static bool is_no_other_programs(const fs::path& directory, const std::string& tag) {
  std::error_code error;
  if (!fs::exists(directory, error)) return true;
  if (!fs::is_directory(directory, error)) return false;
  std::string one = tag;  // that folder decides
  try {
    if (one.empty()) one = read_latest(directory).value_or("");
  } catch (const CheckpointError&) {
    // `latest` is something else.
  }
  if (fs::exists(directory / kManifestName, error)) return true;
  if (one.empty()) return !list_folders(directory).empty();
  return is_tesseras(directory / one) || !fs::exists(directory / one, error);
}

/// nullopt: it is Tessera's, or nobody's.
static std::optional<ForeignCheckpoint> another_programs(const fs::path& directory, const std::string& tag,
                                                         const ParameterOrder& order) {
  if (is_no_other_programs(directory, tag)) return std::nullopt;
  std::optional<ForeignCheckpoint> found = read_foreign(directory, tag, order);
  if (found) take_buffers(*found, order.buffers);
  return found;
}

bool is_another_programs(const fs::path& directory, const std::string& tag) {
  return another_programs(directory, tag, {}).has_value();
}

FoundCheckpoint choose_checkpoint(const fs::path& directory, const std::string& tag) {
  if (const auto foreign = another_programs(directory, tag, {})) return {foreign->path, ""};
  return {directory, find_checkpoint(directory, tag).filename().string()};
}

Manifest read_manifest(const fs::path& folder) {
  const fs::path path = folder / kManifestName;
  try {
    Manifest manifest = Manifest::parse(InputFile(path).read_all(kMaxManifestBytes), path.string());
    check_folder_name(folder, manifest.tag);
    return manifest;
  } catch (const DiskError& error) {
    throw CheckpointError(str(folder.string(), ": is no whole checkpoint: ", error.what()));
  }
}

LatestCheckpoint::LatestCheckpoint(fs::path directory, const std::string& tag)
    : directory_(std::move(directory)), tag_(tag), is_given_(!tag.empty()) {
  const auto named = [&]() -> std::optional<std::string> {
    try {
      return read_latest(directory_);
    } catch (const CheckpointError&) {
      return std::nullopt;
    }
  };
  while (!is_given_) {
    const std::optional<std::string> before = named();
    try {
      tag_ = find_checkpoint(directory_, "").filename().string();
      break;
    } catch (const CheckpointError&) {
      if (named() == before) throw;  // else it was removed just now
    }
  }
  identity_ = folder_identity(directory_ / tag_);
}

std::string LatestCheckpoint::move_on() {
  constexpr int kMostMoves = 50;
  const std::optional<FolderIdentity> now = folder_identity(directory_ / tag_);
  if (is_given_ || (now && now == identity_) || ++num_moves_ > kMostMoves) return "";
  const std::string before = (directory_ / tag_).string();
  const LatestCheckpoint next(directory_, "");
  tag_ = next.tag_;
  identity_ = next.identity_;
  return str(before, now ? " was replaced" : " was removed", " by its run while it was read; ",
             (directory_ / tag_).string(), " is read instead");
}

void read_latest_checkpoint(const fs::path& directory, const std::string& tag,
                            const std::function<void(const std::string& line)>& say,
                            const std::function<void(const std::string& tag)>& read) {
  if (!is_no_other_programs(directory, tag)) return read(tag);
  LatestCheckpoint chosen(directory, tag);
  while (true) {
    try {
      return read(chosen.tag());
    } catch (const Error&) {
      const std::string moved = chosen.move_on();
      if (moved.empty()) throw;
      say(moved);
    }
  }
}

struct Checkpoint::Impl {
  /// A recently read block, for ranges that begin or end within it. There are several, because datasets are
  /// often read alternately.
  struct CachedBlock {
    int rank = -1;
    int64_t block = -1;
    uint64_t used = 0;
    std::vector<std::byte> bytes;
  };

  fs::path path;
  std::optional<ForeignView> foreign;
  Manifest manifest;
  std::atomic<int64_t> bytes_read = 0;

  std::mutex files_mutex;
  std::vector<std::optional<InputFile>> files;  // as in the manifest; opened before they are read, or then

  std::mutex checked_mutex;
  std::vector<std::vector<bool>> checked;  // by rank and block
  std::vector<std::byte> scratch;

  std::mutex cache_mutex;
  std::array<CachedBlock, 4> cache;
  uint64_t clock = 0;

  const InputFile& file(int index) {
    const std::lock_guard lock(files_mutex);
    if (!files[index]) files[index].emplace(path / manifest.files[index].name);
    return *files[index];
  }

  /// Fills `into`, which has the block's length, and verifies it.
  void read_block(int rank, const DatasetRecord& dataset, int64_t block, std::span<std::byte> into) {
    const FileRecord& record = manifest.rank_file(rank);
    const InputFile& input = file(rank);
    input.read_at(block * kBlockBytes, into);
    bytes_read += static_cast<int64_t>(into.size());
    const uint64_t expected = record.block_hashes[block], found = hash_block(into);
    if (found != expected)
      throw CheckpointError(str(input.path().string(), ": ", describe_block(record, block), ", dataset ",
                                dataset.name, ", is damaged: found hash ", hashes_to_hex({&found, 1}),
                                "; expected ", hashes_to_hex({&expected, 1})));
  }

  /// Copies a part of a block, through the cache.
  void copy_from_block(int rank, const DatasetRecord& dataset, int64_t block, int64_t skip,
                       std::span<std::byte> into) {
    const std::lock_guard lock(cache_mutex);
    auto cached = std::find_if(cache.begin(), cache.end(), [&](const CachedBlock& one) {
      return one.rank == rank && one.block == block;
    });
    if (cached == cache.end()) {
      cached = std::min_element(cache.begin(), cache.end(),
                                [](const auto& a, const auto& b) { return a.used < b.used; });
      cached->rank = -1;  // invalid if reading throws
      cached->bytes.resize(static_cast<size_t>(block_bytes(manifest.rank_file(rank), block)));
      read_block(rank, dataset, block, cached->bytes);
      cached->rank = rank;
      cached->block = block;
    }
    cached->used = ++clock;
    std::memcpy(into.data(), cached->bytes.data() + skip, into.size());
  }
};

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

std::optional<Checkpoint> Checkpoint::open_another_programs(const fs::path& directory, const std::string& tag,
                                                            const ParameterOrder& order) {
  std::optional<ForeignCheckpoint> source = another_programs(directory, tag, order);
  if (!source) return std::nullopt;
  auto impl = std::make_unique<Impl>();
  impl->path = source->path;
  impl->foreign.emplace(std::move(*source));
  impl->manifest = impl->foreign->manifest();
  impl->files.resize(1);
  impl->checked.resize(1);
  return Checkpoint(std::move(impl));
}

Checkpoint Checkpoint::open(const fs::path& directory, const std::string& tag, const ParameterOrder& order) {
  if (auto opened = open_another_programs(directory, tag, order)) return *std::move(opened);
  Checkpoint opened = open_all(directory, tag);
  for (int rank = 0; rank < opened.manifest().world_size(); ++rank) {
    const FileRecord& file = opened.manifest().rank_file(rank);
    const fs::path path = opened.path() / file.name;
    const std::optional<InputFile>& held = opened.impl_->files[rank];
    std::error_code error;
    const uintmax_t bytes = held ? static_cast<uintmax_t>(held->bytes()) : fs::file_size(path, error);
    if (error) throw CheckpointError(str(path.string(), ": cannot be read: ", error.message()));
    if (bytes != static_cast<uintmax_t>(file.bytes))
      throw CheckpointError(
          str(path.string(), ": found ", bytes, " bytes; expected ", file.bytes, ", as saved"));
  }
  return opened;
}

Checkpoint Checkpoint::open_damaged(const fs::path& directory, const std::string& tag) {
  if (auto opened = open_another_programs(directory, tag, {})) return *std::move(opened);
  return open_all(directory, tag);
}

Checkpoint Checkpoint::open_all(const fs::path& directory, const std::string& tag) {
  constexpr int kMostOpen = 500;  // the others are opened when they are read
  const fs::path path = find_checkpoint(directory, tag);
  const std::optional<FolderIdentity> before = folder_identity(path);
  Checkpoint opened = open_part(directory, path.filename().string());
  const auto count = std::min<int>(kMostOpen, static_cast<int>(opened.manifest().files.size()));
  for (int index = 0; index < count; ++index) try {
      opened.impl_->file(index);
    } catch (const DiskError&) {
      // Whoever reads it finds out.
    }
  if (folder_identity(path) != before)
    throw CheckpointError(str(path.string(), ": was removed or replaced while it was opened"));
  return opened;
}

Checkpoint Checkpoint::open_part(const fs::path& directory, const std::string& tag) {
  auto impl = std::make_unique<Impl>();
  impl->path = find_checkpoint(directory, tag);
  impl->manifest = read_manifest(impl->path);
  impl->files.resize(impl->manifest.files.size());
  impl->checked.resize(impl->manifest.world_size());
  return Checkpoint(std::move(impl));
}

const InputFile& Checkpoint::file(int index) const { return impl_->file(index); }
const ForeignCheckpoint* Checkpoint::foreign() const {
  return impl_->foreign ? &impl_->foreign->source() : nullptr;
}
const Manifest& Checkpoint::manifest() const { return impl_->manifest; }
const fs::path& Checkpoint::path() const { return impl_->path; }
int64_t Checkpoint::bytes_read() const { return impl_->bytes_read; }

const DatasetRecord& Checkpoint::dataset(int rank, const std::string& name) const {
  const FileRecord& file = impl_->manifest.rank_file(rank);
  const DatasetRecord* const found = file.datasets.find(name);
  if (found == nullptr)
    throw CheckpointError(str((impl_->path / file.name).string(), ": has no dataset ", name));
  return *found;
}

void Checkpoint::read(int rank, const DatasetRecord& dataset, int64_t begin,
                      std::span<std::byte> destination) const {
  const FileRecord& file = impl_->manifest.rank_file(rank);
  TESSERA_CHECK(begin >= 0 && static_cast<int64_t>(destination.size()) <= dataset.bytes - begin,
                dataset.name);
  if (impl_->foreign) {
    impl_->bytes_read += static_cast<int64_t>(destination.size());
    return impl_->foreign->read(dataset, begin, destination);
  }
  try {
    for (int64_t next = dataset.offset + begin; !destination.empty();) {
      const int64_t block = next / kBlockBytes, skip = next % kBlockBytes,
                    in_block = block_bytes(file, block);
      const auto part =
          destination.first(static_cast<size_t>(std::min<int64_t>(in_block - skip, destination.size())));
      if (static_cast<int64_t>(part.size()) == in_block)
        impl_->read_block(rank, dataset, block, part);
      else
        impl_->copy_from_block(rank, dataset, block, skip, part);
      next += static_cast<int64_t>(part.size());
      destination = destination.subspan(part.size());
    }
  } catch (const DiskError& error) {
    throw CheckpointError(error.what());
  }
}

void Checkpoint::check(int rank, const DatasetRecord& dataset, int64_t begin, int64_t bytes) const {
  const FileRecord& file = impl_->manifest.rank_file(rank);
  TESSERA_CHECK(begin >= 0 && bytes <= dataset.bytes - begin, dataset.name);
  if (bytes == 0) return;
  const std::lock_guard lock(impl_->checked_mutex);
  if (impl_->foreign) {  // it has no hashes: what can be read is right
    for (int64_t at = 0; at < bytes; at += kBlockBytes) {
      impl_->scratch.resize(static_cast<size_t>(std::min(kBlockBytes, bytes - at)));
      read(rank, dataset, begin + at, impl_->scratch);
    }
    return;
  }
  std::vector<bool>& checked = impl_->checked[rank];
  checked.resize(file.block_hashes.size());
  const int64_t first = (dataset.offset + begin) / kBlockBytes,
                last = (dataset.offset + begin + bytes - 1) / kBlockBytes;
  try {
    for (int64_t block = first; block <= last; ++block) {
      if (checked[block]) continue;
      impl_->scratch.resize(static_cast<size_t>(block_bytes(file, block)));
      impl_->read_block(rank, dataset, block, impl_->scratch);
      checked[block] = true;
    }
  } catch (const DiskError& error) {
    throw CheckpointError(error.what());
  }
}

std::vector<std::byte> Checkpoint::read_all(int rank, const DatasetRecord& dataset) const {
  std::vector<std::byte> bytes(static_cast<size_t>(dataset.bytes));
  read(rank, dataset, 0, bytes);
  return bytes;
}

}  // namespace tessera::checkpoint

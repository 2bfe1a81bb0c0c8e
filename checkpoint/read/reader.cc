#include "checkpoint/read/reader.h"

#include <sys/stat.h>

#include <algorithm>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/read/foreign_source.h"
#include "checkpoint/read/hashed_files.h"
#include "checkpoint/sharded/catalog.h"
#include "checkpoint/sharded/manifest.h"
#include "core/error.h"
#include "core/files/disk.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string tags_there_are(const fs::path& directory) {
  const std::vector<std::string> tags = list_checkpoints(directory);
  return tags.empty() ? "it has no checkpoints" : "it has " + join(tags, ", ");
}

/// nullopt: there is no `latest`, or it names no checkpoint.
std::optional<std::string> named_by_latest(const fs::path& directory) {
  try {
    return read_latest(directory);
  } catch (const CheckpointError&) {
    return std::nullopt;
  }
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
  throw CheckpointError(folder, ": holds the checkpoint ", tag,
                        " under another name; to use it, give the folder its name back (mv ", folder, " ",
                        folder.parent_path() / tag, "), in another directory if there is a ", tag, " here");
}

}  // namespace

fs::path find_checkpoint(const fs::path& directory, const std::string& tag) {
  if (!is_there(directory)) throw CheckpointError("no checkpoint directory ", directory);
  if (!is_folder(directory))
    throw CheckpointError(directory,
                          ": is no checkpoint; expected a folder of them, or a whole file that "
                          "torch.save or safetensors has written");
  std::string wanted = tag;
  if (tag.empty()) {
    std::optional<std::string> latest;
    try {
      latest = read_latest(directory);
    } catch (const CheckpointError& error) {
      throw CheckpointError(error.what(), "; ", tags_there_are(directory));
    }
    if (!latest) {
      if (is_there(directory / kManifestName))
        throw CheckpointError(
            directory, ": is a checkpoint itself; expected the directory it is in, and its name as the tag");
      throw CheckpointError(directory, ": has no file \"", kLatestName, "\" that names a checkpoint; ",
                            tags_there_are(directory));
    }
    wanted = *latest;
  } else {
    check_tag(tag);
  }
  const fs::path folder = directory / wanted;
  if (!is_folder(folder))
    throw CheckpointError(directory, ": has no checkpoint ", wanted,
                          tag.empty() ? ", which \"latest\" names; " : "; ", tags_there_are(directory));
  return folder;
}

namespace {

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
  if (!is_there(directory)) return true;
  if (!is_folder(directory)) return false;
  const std::string one = tag.empty() ? named_by_latest(directory).value_or("") : tag;  // it decides
  if (is_there(directory / kManifestName)) return true;
  if (one.empty()) return !list_folders(directory).empty();
  return is_tesseras(directory / one) || !is_there(directory / one);
}

/// nullopt: it is Tessera's, or nobody's.
static std::optional<IdentifiedCheckpoint> another_programs(const fs::path& directory,
                                                            const std::string& tag) {
  if (is_no_other_programs(directory, tag)) return std::nullopt;
  return identify(directory, tag);
}

bool is_another_programs(const fs::path& directory, const std::string& tag) {
  return another_programs(directory, tag).has_value();
}

FoundCheckpoint choose_checkpoint(const fs::path& directory, const std::string& tag) {
  if (const auto foreign = another_programs(directory, tag)) return {foreign->path, ""};
  return {directory, find_checkpoint(directory, tag).filename().string()};
}

Manifest read_manifest(const fs::path& folder) {
  const fs::path path = folder / kManifestName;
  try {
    Manifest manifest = Manifest::parse(InputFile(path).read_all(kMaxManifestBytes), path.string());
    check_folder_name(folder, manifest.tag);
    return manifest;
  } catch (const DiskError& error) {
    throw CheckpointError(folder, ": is no whole checkpoint: ", error.what());
  }
}

LatestCheckpoint::LatestCheckpoint(fs::path directory, const std::string& tag)
    : directory_(std::move(directory)), tag_(tag), is_given_(!tag.empty()) {
  while (!is_given_) {
    const std::optional<std::string> before = named_by_latest(directory_);
    try {
      tag_ = find_checkpoint(directory_, "").filename().string();
      break;
    } catch (const CheckpointError&) {
      if (named_by_latest(directory_) == before) throw;  // else it was removed just now
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
             directory_ / tag_, " is read instead");
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

namespace {
constexpr int kMostOpen = 500;  // the others are opened when they are read
}

std::optional<Checkpoint> Checkpoint::open_another_programs(const fs::path& directory, const std::string& tag,
                                                            const ParameterOrder& order) {
  const std::optional<IdentifiedCheckpoint> identified = another_programs(directory, tag);
  if (!identified) return std::nullopt;
  ForeignCheckpoint source = read_foreign(*identified, order);
  take_buffers(source, order.buffers);
  Checkpoint opened;
  opened.path_ = source.path;
  opened.manifest_ = std::make_shared<const Manifest>(manifest_of(source));
  auto elements = std::make_unique<const ForeignSource>(std::move(source), opened.manifest_);
  opened.foreign_ = &elements->source();
  opened.elements_ = std::move(elements);
  return opened;
}

Checkpoint Checkpoint::open_ours(const fs::path& directory, const std::string& tag, int num_open,
                                 bool sizes) {
  Checkpoint opened;
  opened.path_ = find_checkpoint(directory, tag);
  const std::optional<FolderIdentity> before = folder_identity(opened.path_);
  opened.manifest_ = std::make_shared<const Manifest>(read_manifest(opened.path_));
  auto files = std::make_unique<const HashedFiles>(opened.path_, opened.manifest_);
  files->open(num_open);
  if (num_open > 0 && folder_identity(opened.path_) != before)
    throw CheckpointError(opened.path_, ": was removed or replaced while it was opened");
  if (sizes) files->check_sizes();
  opened.elements_ = std::move(files);
  return opened;
}

Checkpoint Checkpoint::open(const fs::path& directory, const std::string& tag, const ParameterOrder& order) {
  if (auto opened = open_another_programs(directory, tag, order)) return *std::move(opened);
  return open_ours(directory, tag, kMostOpen, /*sizes=*/true);
}

Checkpoint Checkpoint::open_damaged(const fs::path& directory, const std::string& tag) {
  if (auto opened = open_another_programs(directory, tag, {})) return *std::move(opened);
  return open_ours(directory, tag, kMostOpen, /*sizes=*/false);
}

Checkpoint Checkpoint::open_part(const fs::path& directory, const std::string& tag) {
  return open_ours(directory, tag, /*num_open=*/0, /*sizes=*/false);
}

VerifyReport verify(const fs::path& directory, const std::string& tag) {
  return Checkpoint::open_damaged(directory, tag).elements().verify();
}

}  // namespace tessera::checkpoint

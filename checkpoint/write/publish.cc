#include "checkpoint/write/publish.h"

#include <sys/stat.h>

#include <optional>
#include <utility>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/files/catalog.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

using Identity = std::pair<dev_t, ino_t>;

/// Device and inode of a path. A failed rename may have taken effect, so undo() compares these.
std::optional<Identity> identity(const fs::path& path) {
  struct stat status{};
  if (::lstat(path.c_str(), &status) != 0) return std::nullopt;
  return Identity{status.st_dev, status.st_ino};
}

/// nullopt: there is no such file, or it cannot be read. A `latest` that is damaged is replaced as one that
/// is not there.
std::optional<std::string> content_of(const fs::path& path) {
  constexpr int64_t kMost = 1 << 16;
  if (!identity(path)) return std::nullopt;
  try {
    return InputFile(path).read_all(kMost);
  } catch (const DiskError&) {
    return std::nullopt;
  }
}

/// Publishes a folder, and can undo that. Used by one thread, once.
class Publisher {
 public:
  Publisher(const Publication& publication, const Disk& disk)
      : disk_(disk),
        directory_(publication.directory),
        folder_(directory_ / publication.temporary),
        target_(directory_ / publication.tag),
        ours_(identity(folder_)),
        replaces_(identity(target_).has_value()) {
    for (const auto& [name, text] : publication.pointers)
      pointers_.push_back({directory_ / name, text, content_of(directory_ / name)});
  }

  void publish() {
    if (replaces_)
      disk_.exchange(folder_, target_);
    else
      disk_.rename(folder_, target_);
    disk_.sync_directory(directory_);
    for (const Pointer& pointer : pointers_) disk_.replace_file(pointer.path, pointer.text);
  }

  /// Undoes the steps in reverse order, so that each pointer always names a whole checkpoint.
  void undo() {
    for (const Pointer& pointer : pointers_) {
      if (content_of(pointer.path) == pointer.old) continue;
      if (pointer.old)
        disk_.replace_file(pointer.path, *pointer.old);
      else
        disk_.remove_all(pointer.path);
    }
    if (identity(target_) == ours_) {
      if (replaces_)
        disk_.exchange(folder_, target_);
      else
        disk_.rename(target_, folder_);
    }
    disk_.sync_directory(directory_);
  }

 private:
  struct Pointer {
    fs::path path;
    std::string text;
    std::optional<std::string> old;
  };

  const Disk& disk_;
  fs::path directory_, folder_, target_;
  std::optional<Identity> ours_;
  bool replaces_;
  std::vector<Pointer> pointers_;
};

}  // namespace

std::vector<fs::path> missing_folders(const fs::path& directory) {
  std::vector<fs::path> missing;
  std::error_code error;
  for (fs::path next = fs::absolute(directory); !fs::exists(next, error) && next.has_relative_path();
       next = next.parent_path())
    if (next.has_filename()) missing.push_back(next);
  return missing;
}

void publish(const Publication& publication, const Disk& disk) {
  Publisher publisher(publication, disk);
  try {
    publisher.publish();
  } catch (const std::exception& error) {
    const std::string reason = error.what();
    try {
      publisher.undo();
    } catch (const std::exception& second) {
      throw CheckpointError(reason, "; and undoing it failed: ", second.what());
    }
    throw CheckpointError(reason);
  }
}

}  // namespace tessera::checkpoint

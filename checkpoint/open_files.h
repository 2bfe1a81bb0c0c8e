// OpenFiles: the files of a checkpoint, opened when they are read, and no more at a time than this process
// may have open.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/files/disk_error.h"

namespace tessera::checkpoint {

/// `File` is made of a path; its constructor throws DiskError where the file cannot be opened. Several
/// threads may use it.
template <class File>
class OpenFiles {
 public:
  explicit OpenFiles(std::vector<std::filesystem::path> paths)
      : paths_(std::move(paths)), files_(paths_.size()) {}

  /// Opens the first `most` files, as far as they can be, and keeps them open: what is open stays readable
  /// when it is removed.
  void keep(int most) {
    const size_t count = std::min({static_cast<size_t>(most), files_.size(), limit() / 2});
    const std::scoped_lock lock(mutex_);
    for (size_t index = 0; index < count; ++index) try {
        if (!files_[index]) files_[index] = std::make_shared<const File>(paths_[index]);
      } catch (const DiskError&) {
        // Whoever reads it finds out.
      }
  }

  std::shared_ptr<const File> get(int index) {
    const auto at = static_cast<size_t>(index);
    TESSERA_CHECK(index >= 0 && at < paths_.size(), "file ", index, " of ", paths_.size());
    const std::scoped_lock lock(mutex_);
    if (files_[at]) return files_[at];
    if (opened_.size() >= limit() / 4) {
      files_[opened_.front()].reset();
      opened_.pop_front();
    }
    files_[at] = std::make_shared<const File>(paths_[at]);
    opened_.push_back(at);
    return files_[at];
  }

  const std::filesystem::path& path(int index) const { return paths_[static_cast<size_t>(index)]; }
  /// nullptr: it is not open.
  std::shared_ptr<const File> find(int index) const {
    const std::scoped_lock lock(mutex_);
    return files_[static_cast<size_t>(index)];
  }

 private:
  /// How many files this process may have open.
  static size_t limit() {
    rlimit limit{};
    return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? static_cast<size_t>(limit.rlim_cur) : 400;
  }

  const std::vector<std::filesystem::path> paths_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<std::shared_ptr<const File>> files_;
  std::deque<size_t> opened_;  // those that get() has opened, the oldest first
};

}  // namespace tessera::checkpoint

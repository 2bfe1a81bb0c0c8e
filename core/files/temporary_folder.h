// TemporaryFolder: a new folder, in the system's temporary folder or another.
#pragma once

#include <filesystem>
#include <string>

namespace tessera {

/// Makes a folder that is removed at the end of its lifetime. Owns the folder, and removes it with its
/// contents unless keep() was called.
class TemporaryFolder {
 public:
  /// Creates PARENT/PREFIX_XXXXXX with a unique name, which only this user can read. `parent`: empty:
  /// TMPDIR. Throws tessera::Error naming it and the reason.
  explicit TemporaryFolder(const std::string& prefix, std::filesystem::path parent = {});
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void keep() { kept_ = true; }

 private:
  std::filesystem::path path_;
  bool kept_ = false;
};

}  // namespace tessera

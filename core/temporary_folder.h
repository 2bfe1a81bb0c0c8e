// TemporaryFolder: a folder of its own among the system's temporary files.
#pragma once

#include <filesystem>
#include <string>

namespace tessera {

/// Owns the folder: removed with all that is in it, unless keep() was called.
class TemporaryFolder {
 public:
  /// Local. TMPDIR/PREFIX_ and six characters that no other folder has. Throws
  /// tessera::Error naming it and the reason.
  explicit TemporaryFolder(const std::string& prefix);
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

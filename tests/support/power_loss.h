// What a power failure may leave of a folder: operations on files are recorded as they
// reach the C library, and replayed in part.
//
// [Note: what a power failure leaves]
// Only what was synced is certain: a file's bytes by fsync of the file, names by fsync of their folder. Of
// what came later each write may be there, be torn, or be missing, and each change of names (create, rename,
// exchange, link, remove) may be there or not, whatever its order. Real file systems keep more; what is right
// under this rule is right on all of them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace tessera::testing {

/// Records the operations of this process below a folder, from its construction to stop(). One at a time;
/// operations may come from any thread.
class FileRecorder {
 public:
  /// Takes what is there as synced.
  explicit FileRecorder(const std::filesystem::path& root);
  ~FileRecorder();
  FileRecorder(const FileRecorder&) = delete;
  FileRecorder& operator=(const FileRecorder&) = delete;

  void stop();
  int size() const;                   ///< operations recorded
  std::string describe(int i) const;  ///< "rename a.tmp-… to a"
  /// What happens to what is not synced.
  enum class Unsynced : uint8_t { kNothingStays, kAllStays, kNamesStay, kBytesStay, kChance };
  /// Makes `target`, a new folder, what a power failure after the first
  /// `num_operations` may leave of the root.
  void replay(int num_operations, Unsynced unsynced, uint64_t seed,
              const std::filesystem::path& target) const;
};

}  // namespace tessera::testing

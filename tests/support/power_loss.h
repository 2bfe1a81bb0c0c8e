// What a power failure may leave of a folder: operations on files are recorded where they reach the C library
// (recorded_calls.h), and replayed in part.
//
// What a power failure leaves.
// Only what was synced is certain: a file's bytes by fsync of the file, names by fsync of their folder. Each
// later write may be there in whole, in part, or not at all. Each later change of a name (create, rename,
// exchange, link, remove) may be there or not, in any combination. Real file systems keep more, so what
// survives this rule survives on all of them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace tessera::testing {

/// Records the operations of this process below a folder, from construction to stop(). At most one at a time.
/// Operations may come from any thread.
class FileRecorder {
 public:
  /// What is there is taken as synced.
  explicit FileRecorder(const std::filesystem::path& root);
  ~FileRecorder();
  FileRecorder(const FileRecorder&) = delete;
  FileRecorder& operator=(const FileRecorder&) = delete;

  void stop();
  int size() const;                   ///< operations recorded
  std::string describe(int i) const;  ///< "rename a.tmp-… to a"
  /// What becomes of operations that were not synced.
  enum class Unsynced : uint8_t { kNothingStays, kAllStays, kNamesStay, kBytesStay, kChance };
  /// Makes `target`, a new folder: what a power failure after the first `num_operations` may leave of the
  /// root. `seed` is for kChance.
  void replay(int num_operations, Unsynced unsynced, uint64_t seed,
              const std::filesystem::path& target) const;
};

}  // namespace tessera::testing

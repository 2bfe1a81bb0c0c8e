// verify(): compares every byte of a checkpoint with the manifest's hashes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/read/reader.h"

namespace tessera::checkpoint {

struct VerifyReport {
  int64_t num_files = 0;
  int64_t num_blocks = 0;
  int64_t bytes = 0;         ///< read
  int64_t num_archives = 0;  ///< of another program's: those of torch.save whose CRC-32 were compared
  /// Elements of weights and states that are NaN or infinite: of another program's checkpoint alone, which
  /// has no hashes. Its tensors count as blocks.
  int64_t num_nonfinite = 0;
  /// Has texts such as "rank_00001.h5: block 7 (bytes 7340032 to 8388608, /exp_avg/unit_00002) is damaged:
  /// …".
  std::vector<std::string> problems;
  std::vector<std::string> by_file;  ///< the first problem of each file of the manifest; empty: it is whole
  bool ok() const { return problems.empty(); }
};

/// Checks files, sizes and hashes, and continues after an error. `progress` (may be empty) is called
/// with the bytes done and the total.
VerifyReport verify(const Checkpoint& checkpoint,
                    const std::function<void(int64_t done, int64_t total)>& progress = {});
/// The same of DIR/TAG. Throws CheckpointError when the manifest is missing or invalid.
VerifyReport verify(const std::filesystem::path& directory, const std::string& tag,
                    const std::function<void(int64_t done, int64_t total)>& progress = {});

}  // namespace tessera::checkpoint

// RunPath: resolves the folder given to a command, which may be RUN, RUN/checkpoints or RUN/checkpoints/TAG.
#pragma once

#include <filesystem>
#include <string>

namespace tessera::train {

struct RunPath {
  std::filesystem::path run;          ///< holds config.json, unless only its checkpoints were copied
  std::filesystem::path checkpoints;  ///< the folder of the checkpoints
  std::string tag;                    ///< of the checkpoint; empty: the latest
};

/// `tag`: the tag given with the folder; empty: none. Any other folder is treated as a folder of
/// checkpoints, and reading it reports what is missing. Throws ConfigError for the folder of one checkpoint
/// with the tag of another.
RunPath find_run(const std::filesystem::path& folder, const std::string& tag);

}  // namespace tessera::train

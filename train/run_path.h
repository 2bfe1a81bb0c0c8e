// RunPath: the folder that a command is given, whichever of a run's it is: RUN,
// RUN/checkpoints or RUN/checkpoints/TAG.
#pragma once

#include <filesystem>
#include <string>

namespace tessera::train {

struct RunPath {
  std::filesystem::path
      run;  ///< with config.json; for checkpoints alone the folder they are in, which need not have one
  std::filesystem::path checkpoints;  ///< the folder of the checkpoints
  std::string tag;                    ///< of the checkpoint; empty: the latest
};

/// Local. `tag`: as given beside the folder; empty for none. A folder that is none of these is
/// taken for one of checkpoints, whose reader says what is missing. Throws ConfigError for a
/// checkpoint's folder beside another tag.
RunPath find_run(const std::filesystem::path& folder, const std::string& tag);

}  // namespace tessera::train

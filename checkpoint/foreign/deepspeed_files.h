// The files of a folder that DeepSpeed has written.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace tessera::checkpoint {

struct DeepSpeedFiles {
  std::filesystem::path folder;
  std::vector<std::filesystem::path> optimizer;  ///< "…_optim_states.pt", by rank; empty: none
  std::vector<std::filesystem::path> model;      ///< "…_model_states.pt": of stage 3 by rank, else one
  bool model_by_rank = false;                    ///< the names of `model` have ranks: stage 3
};

/// The folder of one checkpoint: `path` itself, that of the file `path`, `path`/`tag`, or the one that the
/// file `latest` of `path` names. nullopt: `path` has none. Throws CheckpointError for a `latest` without its
/// folder.
std::optional<std::filesystem::path> deepspeed_folder(const std::filesystem::path& path,
                                                      const std::string& tag, const std::string& latest);
/// Whether a folder is of the universal format, which has a folder for each parameter.
bool is_deepspeed_universal(const std::filesystem::path& folder);

/// Lists the files of a folder. Throws CheckpointError for a rank that is missing or there twice, and for
/// files of pipeline parallelism and of experts. `universal`: files of tensor parallelism are allowed, of
/// which the first rank's are listed.
DeepSpeedFiles list_deepspeed_files(const std::filesystem::path& folder, bool universal);

}  // namespace tessera::checkpoint

// read_foreign(): asks the readers of the formats in turn.
#include "checkpoint/checkpoint_error.h"
#include "checkpoint/foreign/foreign_checkpoint.h"
#include "checkpoint/foreign/saved_state.h"
#include "core/str.h"

namespace tessera::checkpoint {

// Trainers first: their folders have the files of DeepSpeed and DCP, which they have read, and more. A
// universal folder is one of DeepSpeed's without the files of ranks. A model last: the folders of trainers
// have one.
std::optional<ForeignCheckpoint> read_foreign(const std::filesystem::path& path, const std::string& tag,
                                              const ParameterOrder& order) {
  std::error_code error;
  if (!std::filesystem::exists(path, error))
    throw CheckpointError(str(path.string(), " does not exist; expected a checkpoint's folder or file"));
  const std::filesystem::path one = tag.empty() ? path : path / tag;
  std::optional<ForeignCheckpoint> found = read_trainer(one, order);
  if (!found) found = read_deepspeed(path, tag);
  if (!found) found = read_deepspeed_universal(path, tag);
  if (!found && !tag.empty() && !std::filesystem::exists(one, error))
    throw CheckpointError(str(one.string(), " does not exist; expected the checkpoint ", tag, " there"));
  if (!found) found = read_distributed(one);
  if (!found) found = read_model(one);
  if (!found) return found;
  check(*found);
  join_tied(*found, order.aliases);
  return found;
}

}  // namespace tessera::checkpoint

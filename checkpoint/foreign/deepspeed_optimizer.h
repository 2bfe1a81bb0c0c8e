// DeepSpeed's files "…_optim_states.pt": of each rank a part of flat groups, in which parameters lie one
// after the other.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/foreign/deepspeed_files.h"
#include "checkpoint/foreign/deepspeed_model.h"
#include "checkpoint/foreign/foreign_checkpoint.h"

namespace tessera::checkpoint {

/// A rank's part of a flat group: of stages 1 and 2 a partition, of stage 3 parts of the parameters of a
/// sub-group.
struct FlatPart {
  TorchTensor weights;
  std::map<std::string, TorchTensor> states;  ///< of the same length, or longer by `padding`
  std::optional<int64_t> steps;
  int64_t padding = 0;
};

/// What an optimizer's state_dict says of one flat parameter, and its group.
struct FlatState {
  std::map<std::string, TorchTensor> tensors;
  std::optional<int64_t> steps;
  int group = 0;
};

struct FlatOptimizer {
  std::vector<nlohmann::json> groups;  ///< options
  std::vector<FlatState> states;       ///< by number, as the groups have them
};

/// Reads torch.optim's state_dict(), or the list of states of an elastic checkpoint, which has no options.
/// What is no contiguous tensor of floating-point numbers, nor a count, is added to `lost`; nor is a tensor
/// of no dimension one.
FlatOptimizer read_flat_optimizer(const TorchFile& file, const PickleValue& value,
                                  std::vector<LostValue>& lost);
/// What group_options() says of DeepSpeed's groups: all of them have the same.
inline constexpr const char* kOptionOfGroups = "the param groups' option ";
/// Says what read_flat_optimizer() has lost, each line once.
void say_lost(ForeignCheckpoint& checkpoint, const std::vector<LostValue>& lost);

/// Fills parameters, groups, stage, world size and loss scaler from the files of all ranks.
void read_zero_optimizer(ForeignCheckpoint& checkpoint, const DeepSpeedFiles& files,
                         const DeepSpeedModel& model);

}  // namespace tessera::checkpoint

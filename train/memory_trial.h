// A memory trial: trains a few steps and measures one rank's memory by use. `tessera memory` runs one for
// each stage.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "comm/init/init.h"
#include "core/memory/memory_use.h"
#include "engine/profile/memory_meter.h"
#include "train/memory/memory_timeline.h"
#include "train/memory/state_formulas.h"
#include "train/task/registry.h"
#include "train/task/trainer_config.h"
#include "zero/plan/memory_model.h"

namespace tessera {
class Engine;
}

namespace tessera::train {

struct MemoryTrialOptions {
  int num_steps = 5;  ///< timed steps; further steps warm up and record the timeline and the process's peak
  int simulate_world = 0;  ///< above 0: the process runs alone and holds what rank simulate_rank
                           ///< would hold in a group of this size (comm/init/self.h)
  int simulate_rank = 0;
};

/// What one rank has on disk. Bytes.
struct DiskTrial {
  bool used = false;          ///< some of the model's state lies there
  zero::StateBytes formula;   ///< model state
  zero::StateBytes held;      ///< the same, added up from the tensors
  int64_t file = 0;           ///< what the kernel says that the file has; tensors begin at whole pages
  int64_t buffers_limit = 0;  ///< of MemoryUse::kDiskBuffers, unless one update needs more at once
  int64_t read = 0;           ///< by a step
  int64_t written = 0;
};

/// What one rank has in the host's memory, where that is not the device's. Bytes.
struct HostTrial {
  bool used = false;         ///< some of the model's state lies there
  zero::StateBytes formula;  ///< model state
  zero::StateBytes held;     ///< the same, added up from the tensors
  int64_t pinned = 0;        ///< page-locked, with the buffers that state passes through
};

/// What one rank has measured. Memory in bytes.
struct MemoryTrial {
  int stage = 0;
  int rank = 0;
  int world_size = 1;
  std::string device;     ///< "cpu", "cuda"
  std::string backend;    ///< Communicator::backend()
  std::string precision;  ///< precision_of()
  std::string optimizer;
  std::string activations;  ///< activation_checkpointing.policy
  int64_t micro_batch = 1;
  std::string tiers;          ///< TierSetting::key; "other": none of them
  zero::StateBytes formula;   ///< model state in memory
  MemoryBytes held;           ///< between steps
  int64_t rounding = 0;       ///< CUDA: by how much the model state's blocks in `held` exceed its tensors
  MemoryBytes peak;           ///< when most was allocated during the steps
  int64_t peak_reserved = 0;  ///< CUDA: reserved by the caching allocator
  /// Private memory plus the process's share of shared memory, above what it was before the model was made.
  int64_t process_peak = 0;
  /// The most that the process has had, with libraries' code, and memory that ranks share by its share: from
  /// the start to the last step.
  int64_t whole_peak = 0;
  int64_t code = 0;  ///< of that, file mappings, which ranks of one host share
  HostTrial host;
  DiskTrial disk;
  double step_ms = 0;                  ///< median
  std::vector<MemorySample> timeline;  ///< of one step; at most kMaxSamples, each the largest of its interval
  /// "forward", "backward", "step": when they begin, in seconds on the timeline.
  Phases phases;
  static constexpr size_t kMaxSamples = 150;
  MemoryRecord record;  ///< of the same step, with every block; not in to_json()
  ModelCount model;     ///< not in to_json()

  int64_t model_state() const;  ///< of `held`
};

/// Fills in the bytes of the states that owners of whole parameters keep; 0 for other optimizers.
/// `parameters`: the model's.
void count_owned(const OptimizerConfig& config, const std::vector<zero::ParameterSpec>& parameters,
                 ModelCount& count);
/// What the formulas need of the engine's model and configuration.
ModelCount count_of(Engine& engine);

/// Fills in what needs no measurement: what the engine and its configuration are, `tiers` and `model`.
void describe_engine(Engine& engine, MemoryTrial& trial);

/// Collective. Throws what run() throws.
MemoryTrial run_memory_trial(RunConfig run, const Registry& registry, const comm::Environment& environment,
                             const MemoryTrialOptions& options, const Logger& logger);

/// The format in which a rank sends its result to the command, and of the command's files.
nlohmann::ordered_json to_json(const MemoryTrial& trial);
MemoryTrial memory_trial_of(const nlohmann::json& json);

}  // namespace tessera::train

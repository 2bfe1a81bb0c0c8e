// A memory trial: a task really trains a few steps, and one rank says what its memory was for.
// `tessera memory` runs one for every stage.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "comm/init.h"
#include "core/memory_use.h"
#include "engine/memory_meter.h"
#include "train/registry.h"
#include "train/trainer_config.h"
#include "zero/memory_model.h"

namespace tessera::train {

struct MemoryTrialOptions {
  int num_steps = 5;  ///< timed ones; more are run to warm up, for the time line and to look at the process
  int simulate_world =
      0;  ///< above 0: this process is alone and holds what a rank of so many would (comm/self.h)
  int simulate_rank = 0;
};

/// What one rank measured. Bytes.
struct MemoryTrial {
  int stage = 0;
  int rank = 0;
  int world_size = 1;
  std::string device;     ///< "cpu", "cuda"
  std::string backend;    ///< Communicator::backend()
  std::string precision;  ///< "fp32", "bf16 under fp16 autocast" …
  std::string optimizer;
  zero::StateBytes formula;   ///< model state
  MemoryBytes held;           ///< between steps
  MemoryBytes peak;           ///< at the moment of a step when the allocator had given out most
  int64_t peak_reserved = 0;  ///< CUDA: what the caching allocator had taken from the device
  int64_t process_peak =
      0;  ///< private memory and its share of shared memory, over what it was before the model was made
  double step_ms = 0;                  ///< median
  std::vector<MemorySample> timeline;  ///< of one step; at most kMaxSamples, each the largest of its time
  std::vector<std::pair<std::string, double>>
      phases;  ///< "forward", "backward", "step": when they begin, seconds
  static constexpr size_t kMaxSamples = 150;

  int64_t model_state() const;  ///< of `held`
};

/// Collective. Throws what run() throws.
MemoryTrial run_memory_trial(RunConfig run, const Registry& registry, const comm::Environment& environment,
                             const MemoryTrialOptions& options, const Logger& logger);

/// Local. For files, and on the way from a rank to the command.
nlohmann::ordered_json to_json(const MemoryTrial& trial);
MemoryTrial memory_trial_of(const nlohmann::json& json);

}  // namespace tessera::train

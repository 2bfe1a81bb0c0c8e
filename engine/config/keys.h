// The engine's keys, in four files: what the engine uses (keys_engine.cc), optimizers (keys_optimizer.cc),
// schedules (keys_schedule.cc), and DeepSpeed's further keys, which have no effect here or are refused
// (keys_deepspeed.cc).
#pragma once

#include <array>
#include <vector>

#include "engine/config/batch.h"
#include "engine/config/config.h"
#include "engine/config/key.h"

namespace tessera::config {

/// DeepSpeed's old forms of the offload sections: `true` means `device` "cpu" in the section.
struct OldOffload {
  const char* name;
  const char* section;
};
inline constexpr std::array<OldOffload, 2> kOldOffload = {
    {{"cpu_offload", "offload_optimizer"}, {"cpu_offload_param", "offload_param"}}};

/// Every key at the engine's level, DeepSpeed's and our own.
KeyTable engine_keys();

/// The fields behind them: all but the batch triple, the optimizer and the schedule.
std::vector<Field> fields_of(EngineConfig& config);
std::vector<Field> fields_of(GivenBatch& batch);

/// Keys in JSON that choose the type, a default or other keys' values, and are not options themselves.
struct OptimizerModes {
  bool adam_w_mode = true;  ///< Adam, AdamW
  bool torch_adam = false;
  std::optional<double> muon_lr, adam_lr;  ///< Muon
  std::string ns_method = "standard";
};
/// `modes` may be null: then without these keys.
std::vector<Field> fields_of(OptimizerOptions& options, OptimizerModes* modes = nullptr);
std::vector<Field> fields_of(ScheduleOptions& schedule);

/// The sections `optimizer` and `scheduler`, which fields_of() has for one type, with the keys of all.
std::vector<Key> optimizer_keys();
std::vector<Key> schedule_keys();
/// DeepSpeed's keys that have no effect here or are refused.
std::vector<Key> deepspeed_keys();

}  // namespace tessera::config

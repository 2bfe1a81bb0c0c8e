// The engine's key table, in four files: what the engine uses (keys.cc), optimizers and schedulers
// (keys_optimizer.cc), monitors (keys_monitor.cc), and DeepSpeed's further keys, which have no effect
// here or are refused (keys_deepspeed.cc).
#pragma once

#include <vector>

#include "engine/config/key.h"

namespace tessera::config {

/// Local. Every key at the engine's level, DeepSpeed's and our own.
KeyTable engine_keys();

std::vector<Key> optimizer_keys();
std::vector<Key> scheduler_keys();
std::vector<Key> monitor_sections();
std::vector<Key> zero_keys_without_effect();  ///< inside zero_optimization
std::vector<Key> checkpoint_keys_without_effect();
std::vector<Key> precision_keys_without_effect();  ///< inside fp16, bf16, torch_autocast, data_types
std::vector<Key> other_deepspeed_keys();

}  // namespace tessera::config

// The batch triple: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world
// size. Rules as DeepSpeed's DeepSpeedConfig._set_batch_related_parameters, with exact division.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::config {

inline constexpr const char* kTrainBatchSize = "train_batch_size";
inline constexpr const char* kMicroBatchSize = "train_micro_batch_size_per_gpu";
inline constexpr const char* kAccumulationSteps = "gradient_accumulation_steps";

struct GivenBatch {
  std::optional<int64_t> train = {};         ///< kTrainBatchSize
  std::optional<int64_t> micro = {};         ///< kMicroBatchSize
  std::optional<int64_t> accumulation = {};  ///< kAccumulationSteps
  bool any_auto = false;                     ///< one of them was "auto": then none needs to be given
};

struct Batch {
  int64_t train = 0;
  int64_t micro = 0;
  int64_t accumulation = 1;
};

/// Micro batch when all is left to "auto": the Hugging Face Trainer's per_device_train_batch_size.
inline constexpr int64_t kAutoMicroBatch = 8;

/// Any two give the third; train alone or micro alone means one accumulation step. Throws ConfigError
/// "<source>: <equation with numbers>; <values that would do>".
Batch resolve_batch(const GivenBatch& given, int world_size, const std::string& source);

/// The same number of samples on another number of ranks: the micro-batch is the largest that divides
/// a rank's share and is at most `micro`. nullopt: the ranks do not divide `train`.
std::optional<Batch> divide_batch(int64_t train, int64_t micro, int world_size);

}  // namespace tessera::config

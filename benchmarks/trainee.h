// Trainee: one rank's training loop under measurement: a plain libtorch loop, or the engine.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "benchmarks/gpt.h"

namespace tessera::benchmarks {

/// How a rank trains. The first two need no other rank.
enum class Mode { kPlain, kEngineAlone, kStage0, kStage1, kStage2, kStage3 };
inline constexpr Mode kAllModes[] = {Mode::kPlain,  Mode::kEngineAlone, Mode::kStage0,
                                     Mode::kStage1, Mode::kStage2,      Mode::kStage3};

std::string name_of(Mode mode);

struct Task {
  Mode mode = Mode::kPlain;
  GptOptions shape;
  int64_t micro_batch = 2;
  std::vector<std::string> overrides;  ///< of the engine's configuration, as for --set
};

/// The parts of one step's time.
struct StepTimes {
  double step_s = 0;  ///< from the end of the step before
  double forward_s = 0;
  double backward_s = 0;
  double update_s = 0;  ///< Engine::step: norm, clipping, optimizer
  double cpu_s = 0;     ///< CPU time of all the rank's threads; a busy machine disturbs it little
};

class Trainee {
 public:
  virtual ~Trainee() = default;
  /// Collective, except in the modes that train alone. One step of forward,
  /// backward, clipping at norm 1 and AdamW.
  virtual StepTimes step() = 0;
  /// Bytes of parameters, gradients, masters and optimizer state this rank holds.
  virtual int64_t state_bytes() const = 0;
  virtual int64_t num_parameters() const = 0;
};

/// Collective, except in the modes that train alone. Joins the other ranks by torchrun's environment
/// variables.
std::unique_ptr<Trainee> make_trainee(const Task& task);

}  // namespace tessera::benchmarks

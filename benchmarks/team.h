// Team: the ranks that train one way, as processes that are kept alive and train in turns. Ways that are
// compared take turns too, so that a noisy machine hurts all of them alike.
#pragma once

#include <string>
#include <vector>

#include "benchmarks/trainee.h"
#include "core/file_descriptor.h"
#include "launcher/port.h"
#include "launcher/process.h"

namespace tessera::benchmarks {

/// What the ranks of a team say about themselves once training has settled. The largest of all ranks.
struct Footprint {
  double peak_mb = 0;   ///< VmHWM: the most a rank's process ever had resident, libtorch's code included
  double state_mb = 0;  ///< parameters, gradients, masters and optimizer state
  double num_parameters = 0;
};

/// Owns the processes. Not thread-safe.
class Team {
 public:
  /// Local. Starts `size` ranks of this very program, one thread each. In the modes that train
  /// alone they train side by side, without knowing of each other: every core is as busy as in
  /// the others. Throws Error when one dies.
  Team(Mode mode, int size, const std::vector<std::string>& rank_args);

  /// Local. One step that doesn't count, then `num_steps` that do: the slowest rank's times, by step.
  std::vector<StepTimes> turn(int num_steps);
  Footprint footprint();

 private:
  struct Rank {
    launcher::Process process;
    FileDescriptor to;
    FileDescriptor from;
    std::string read;  ///< received and not yet used
  };

  void ask(const std::string& line);
  std::string answer_of(size_t rank);

  std::string name_;
  launcher::PortReservation port_{0};
  std::vector<Rank> ranks_;
};

}  // namespace tessera::benchmarks

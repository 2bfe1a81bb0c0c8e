// Team: the ranks that train in one way, as processes that stay alive between measurements. The ways that are
// compared alternate, so that a busy machine disturbs all of them alike.
#pragma once

#include <string>
#include <vector>

#include "benchmarks/trainee.h"
#include "core/files/file_descriptor.h"
#include "launcher/environment/port.h"
#include "launcher/process/process.h"

namespace tessera::benchmarks {

/// The memory of a rank after training has settled; the largest of all ranks.
struct Footprint {
  double peak_mb = 0;   ///< VmHWM: the peak resident memory of a rank's process, libtorch's code included
  double state_mb = 0;  ///< parameters, gradients, masters and optimizer state
  double num_parameters = 0;
};

/// Owns the processes. Not thread-safe.
class Team {
 public:
  /// Starts `size` ranks of this program, one thread each. In the modes that train alone they train at
  /// the same time without communication, so that every core is as busy as in the other modes. Throws Error
  /// if one ends.
  Team(Mode mode, int size, const std::vector<std::string>& rank_args);

  /// One step that doesn't count, then `num_steps` that do: the slowest rank's times, by step.
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

// Choosing what to drop, and what to offload, so that what is kept fits into a number of bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "activations/policy.h"
#include "activations/tensor_spill.h"

namespace tessera::activations {

/// What a forward did: its operators and their results, by numbers in the order in which they were made.
struct Profile {
  struct Call {
    std::string name;
    double seconds = 0;
    bool repeatable = false;
    std::vector<int> inputs = {};  ///< results that it read
  };
  struct Result {
    int call = -1;
    int storage = -1;  ///< results with the same number share memory
    int64_t bytes = 0;
    bool saved = false;   ///< autograd saved it
    bool pinned = false;  ///< is kept in any case
  };
  std::vector<Call> calls;
  std::vector<Result> results;
  int64_t fixed_bytes = 0;  ///< saved, but not the result of an operator
};

struct Plan {
  std::vector<Fate> fates;  ///< by result
  int64_t kept_bytes = 0;   ///< of saved tensors, each memory once; and of fixed ones; without buffers
  int64_t offloaded_bytes = 0;
  double seconds = 0;  ///< of the operators that run again
};

/// What offloading costs. Writes run beside the forward, and reads beside backward, which takes about twice
/// its time; a step only waits for what these do not hide, and for the copies into buffers.
struct OffloadCost {
  SpillRates rates;
  int64_t min_bytes = 0;     ///< smaller results are not offloaded
  int64_t buffer_bytes = 0;  ///< of the budget, and at least the largest offloaded result: for buffers
};

/// Drops or offloads, one after the other, what frees the most bytes for a second lost, until
/// `budget_bytes` are enough; then takes back what fits into the rest. Where they are never enough: all that
/// can leave memory does. `offload`: unset where there is no disk for it.
Plan choose(const Profile& profile, int64_t budget_bytes,
            const std::optional<OffloadCost>& offload = std::nullopt);

}  // namespace tessera::activations

// Choosing what to drop so that what is kept fits into a number of bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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
  std::vector<bool> drop;  ///< by result
  int64_t kept_bytes = 0;  ///< of saved tensors, each memory once; and of fixed ones
  double seconds = 0;      ///< of the operators that run again
};

/// Local. Drops, one after the other, what frees the most bytes for a second of recomputation, until
/// `budget_bytes` are enough; then takes back what fits into the rest. Where they are never enough: all that
/// can be dropped is.
Plan choose(const Profile& profile, int64_t budget_bytes);

}  // namespace tessera::activations

// DataDigest: a short hash of a task's data sets. Comparing digests finds ranks whose files differ, and a
// resumed run whose train/evaluation split has changed (it would be evaluated on samples it was trained on).
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "train/task/task.h"

namespace tessera::train {

struct SetDigest {
  std::string name;    ///< "training", "evaluation", "test"
  int64_t size = 0;    ///< samples
  std::string digest;  ///< hash of types, shapes and bytes of up to 16 evenly spaced samples
  bool operator==(const SetDigest&) const = default;
};
using DataDigest = std::vector<SetDigest>;  ///< one for each set of a task

/// Collective. Compares the ranks' data, reading one sample at a time. Returns their common digest. Throws
/// ConfigError, on all ranks alike, naming a set and a rank where it differs from rank 0's; DataError if a
/// sample cannot be read.
DataDigest check_same_data(const Task& task, comm::Communicator& comm);

/// Which sets have changed, and how: "the evaluation set has 90 samples, 100 before; the test set has
/// other samples than before". Empty if none has.
std::string describe_change(const DataDigest& before, const DataDigest& now);

/// [["training", 60000, "…"], …]. from_json throws nlohmann::json::exception.
nlohmann::json to_json(const DataDigest& digest);
DataDigest digest_from_json(const nlohmann::json& value);

}  // namespace tessera::train

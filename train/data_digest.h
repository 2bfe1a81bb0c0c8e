// What tells data sets apart without sending them: ranks whose files differ would train on a mixture that
// nobody asked for, and a run that goes on with another split would evaluate what it was trained on.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "train/task.h"

namespace tessera::train {

struct SetDigest {
  std::string name;    ///< "training", "evaluation", "test"
  int64_t size = 0;    ///< samples
  std::string digest;  ///< of types, shapes and bytes of up to 16 evenly spread samples
  bool operator==(const SetDigest&) const = default;
};
using DataDigest = std::vector<SetDigest>;  ///< of each of a task's sets

/// Collective. Compares the ranks' data, whose samples are made one at a time. Returns what they agree on.
/// Throws ConfigError, on all ranks alike, naming a set and a rank that has another one than rank 0;
/// DataError where a sample cannot be made.
DataDigest check_same_data(const Task& task, comm::Communicator& comm);

/// Local. Which sets have changed, and how: "the evaluation set has 90 samples, 100 before; the test set has
/// other samples than before"; "": none.
std::string describe_change(const DataDigest& before, const DataDigest& now);

/// [["training", 60000, "…"], …]. from_json throws nlohmann::json::exception.
nlohmann::json to_json(const DataDigest& digest);
DataDigest digest_from_json(const nlohmann::json& value);

}  // namespace tessera::train

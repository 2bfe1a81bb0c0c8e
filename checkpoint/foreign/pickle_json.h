// What JSON has of a pickled value: options of optimizers, schedulers, counters. Nothing is made up: what
// JSON does not have is left out and said.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/formats/pickle.h"
#include "checkpoint/formats/torch_file.h"

namespace tessera::checkpoint {

/// The value as JSON: tuples and sets are arrays, a tensor of one element is its number, a torch.dtype its
/// name. Members of dicts that JSON does not have, and those whose keys are no texts, are left out, with a
/// line "WHAT.KEY: an object of class …" in `not_read`. nullopt, with a line, where the whole value is of
/// that kind. `file`: has the tensors; null: tensors are not read.
std::optional<nlohmann::json> to_json(const PickleValue& value, const TorchFile* file,
                                      const std::string& what, std::vector<std::string>& not_read);

/// The same for what Python gets back: what JSON does not have is an object with the key kValueTag, as
/// python/tessera/json_values.py reads it. So tuples, sets, numbers that are not finite, OrderedDicts,
/// Counters, and dicts whose keys are numbers or tuples are what they were.
std::optional<nlohmann::json> to_tagged_json(const PickleValue& value, const TorchFile* file,
                                             const std::string& what, std::vector<std::string>& not_read);

/// The number that a tensor of one element has. nullopt: more elements, or a type that JSON does not have.
std::optional<nlohmann::json> number_of(const TorchFile& file, const TorchTensor& tensor);

/// A count that a program wrote as an integer, a float or a tensor: 3, 3.0, tensor(3.). nullopt for others.
std::optional<int64_t> count_of(const nlohmann::json& value);
/// The same of a value of a file; nullopt for none.
std::optional<int64_t> count_in(const TorchFile& file, const PickleValue* value);

}  // namespace tessera::checkpoint

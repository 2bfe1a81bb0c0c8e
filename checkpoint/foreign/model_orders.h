// The order of the parameters of models of Hugging Face's transformers.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/foreign/saved_state.h"

namespace tessera::checkpoint {

/// The names in the model's order, by the architecture that config.json names. Empty: the architecture is not
/// known here, or has parts that are not.
std::vector<std::string> known_order(const nlohmann::json& config, const std::vector<SavedTensor>& entries);

}  // namespace tessera::checkpoint

// Writes what a checkpoint's state has of Python (numbers, texts, lists, and the values that JSON lacks,
// which are objects with the key "$tessera": docs/checkpoint_format.md) into a pickle.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/formats/pickle_writer.h"

namespace tessera::checkpoint {

/// Empty: write_value() takes it. Else what it has that a pickle of ours lacks, as in "a value of type
/// array".
std::string unwritable(const nlohmann::json& value);
void write_value(PickleWriter& pickle, const nlohmann::json& value);

}  // namespace tessera::checkpoint

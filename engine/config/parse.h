// Reading an EngineConfig from JSON, strictly, and writing it back in full.
//
//   auto config = tessera::load_engine_config("ds_config.json", {.world_size = comm->size()});
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "engine/config/check.h"
#include "engine/config/config.h"

namespace tessera {

struct ConfigOptions {
  int world_size = 1;
  std::vector<std::string> overrides = {};  ///< `zero_optimization.stage=3`, as given to --set
  std::string override_source = "--set";    ///< what gives them, for messages
  std::vector<std::string> other_sections =
      {};                                  ///< top-level sections that belong to the caller, not looked at
  config::ConfigReport* report = nullptr;  ///< receives warnings and what became of "auto"; may be null
};

/// A DeepSpeed ds_config.json. Throws ConfigError: for each error, in the order of the file, one
/// line with file, line, JSON path, what was found and what was expected.
EngineConfig load_engine_config(const std::string& file, const ConfigOptions& options = {});

/// The same from text; `source` names it in errors.
EngineConfig parse_engine_config(std::string_view json_text, const ConfigOptions& options = {},
                                 const std::string& source = "config");

/// A config built or changed in C++, checked as strictly as a file, with the batch triple resolved
/// (0: not given). Throws ConfigError.
EngineConfig validated(const EngineConfig& config, int world_size);

/// Every used key as indented JSON text, which parses to the same values again.
std::string dump_resolved(const EngineConfig& config);

namespace config {

// The steps of reading, for a program with sections of its own in the same file
// (train/task/trainer_config.h): prepare() with the keys of all sections, then read each part.

/// Resolves aliases, old forms and Hugging Face's arguments, applies the overrides, and checks every
/// key. Throws ConfigError, with a line for each error.
void prepare(Document& document, const KeyTable& table, const std::vector<std::string>& overrides,
             ConfigReport* report);
/// The engine's part of a prepared document; not to be used when there are problems.
EngineConfig read_engine_config(const Document& document, int world_size, Problems& problems,
                                ConfigReport* report);
/// The engine's part of the resolved configuration.
nlohmann::ordered_json write_engine_config(const EngineConfig& config);

}  // namespace config
}  // namespace tessera

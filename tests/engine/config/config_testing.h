// Parses keys together with a valid batch size; exact messages of ConfigErrors.
#pragma once

#include <string>

#include "core/error.h"
#include "engine/config/parse.h"

namespace tessera {

/// "" when nothing is thrown.
template <class Call>
std::string config_error(Call call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

/// `keys` beside a valid batch size, as in a file c.json.
inline EngineConfig parse_keys(const std::string& keys, config::ConfigReport* report = nullptr) {
  return parse_engine_config("{\"train_batch_size\": 8, " + keys + "}", {.report = report}, "c.json");
}

/// The error for these keys beside a valid batch size.
inline std::string error_for(const std::string& keys) {
  return config_error([&] { parse_keys(keys); });
}

}  // namespace tessera

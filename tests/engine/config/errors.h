// The message of the ConfigError that a call throws, for tests that hold messages to the letter.
#pragma once

#include <string>

#include "core/error.h"

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

}  // namespace tessera

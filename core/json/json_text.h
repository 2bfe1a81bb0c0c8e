// json_text: how this project writes JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace tessera {

/// Returns the value as JSON, in UTF-8 whatever its strings hold: a byte that is not UTF-8, as the name of a
/// folder may have, becomes U+FFFD. nlohmann's dump() throws there by default. So a name that is read back
/// and used must be sent another way. `indent`: spaces a level; -1: all in one line.
template <class Json>
std::string json_text(const Json& value, int indent = -1) {
  return value.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

}  // namespace tessera

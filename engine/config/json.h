// The strict JSON reader under Document: nlohmann's parser, with positions, duplicate keys, a depth limit,
// and syntax errors in one line of plain words.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace tessera::config {

class Origins;

/// Nesting deeper than this is an error: no configuration needs it, and a bomb must not exhaust the stack.
inline constexpr int kMaxJsonDepth = 64;

/// Local. Parses `text`; comments are allowed. Fills `origins` (may be null) with the line of every key.
/// Throws ConfigError "source:line:column: …".
nlohmann::json parse_json(std::string_view text, const std::string& source, Origins* origins);

}  // namespace tessera::config

// Names of tensors come from files of others, and go into error messages and into files of others.
#pragma once

#include <string>
#include <string_view>

namespace tessera::checkpoint {

/// Local. Well-formed UTF-8: no overlong forms, no surrogates, nothing beyond U+10FFFF.
bool is_utf8(std::string_view text);

/// Local. "'encoder.weight'" for an error message: one line whatever the name holds, at most 200 bytes of it.
std::string quoted_name(std::string_view name);

}  // namespace tessera::checkpoint

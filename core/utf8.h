// Text from others: names of tensors, tags, configurations. It goes into error
// messages and into files of others.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera {

/// Local. Bytes of the well-formed UTF-8 character that `text`, which is not empty, starts with; 0 when there
/// is none: an overlong form, a surrogate, something beyond U+10FFFF or cut off.
size_t utf8_length(std::string_view text);

/// Local. Well-formed UTF-8 throughout.
bool is_utf8(std::string_view text);

/// Local. `text` with U+FFFD in place of each byte that belongs to no well-formed character.
std::string as_utf8(std::string_view text);

/// Local. Characters of `text`; each byte that belongs to no well-formed one counts as one. In print they are
/// columns, except for wide and combining ones.
size_t num_characters(std::string_view text);

/// Local. The first `count` of them; all where there are no more.
std::string_view first_characters(std::string_view text, size_t count);

/// Local. "'encoder.weight'" for an error message: one line whatever the name holds, at most 200 bytes of it.
std::string quoted_name(std::string_view name);

}  // namespace tessera

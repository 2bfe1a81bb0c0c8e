// Texts and integers as pickles have them, in the encodings of Python 2 and 3. For pickle.cc only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::checkpoint {

/// For a message: one line without control characters, not long.
std::string shown_text(std::string_view text);

/// Adds the UTF-8 of a code point.
void append_utf8(std::string& out, uint32_t code);

/// UTF-8 of Python's "utf-8" with "surrogatepass": a lone surrogate becomes "\\udc80", as text. nullopt: it
/// is none.
std::optional<std::string> decoded_utf8(std::string_view text);

/// The Latin-1 bytes of well-formed UTF-8. nullopt: it has other characters.
std::optional<std::string> encoded_latin1(std::string_view text);

/// The decimal digits of an integer: two's complement, little-endian, not empty. Takes the square of the
/// length.
std::string decimal_digits(std::string_view bytes);

}  // namespace tessera::checkpoint

// Checks of untrusted text (names of tensors, tags, configurations) for error messages and files.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera {

/// Bytes of the well-formed UTF-8 character at the start of `text`, which must not be empty; 0 if
/// there is none (overlong form, surrogate, beyond U+10FFFF, or truncated).
size_t utf8_length(std::string_view text);

/// Whether all of `text` is well-formed UTF-8.
bool is_utf8(std::string_view text);

/// Replaces each byte that is not part of a well-formed character by U+FFFD.
std::string as_utf8(std::string_view text);

/// Number of characters; each byte that is not part of a well-formed one counts as one. Equals the
/// printed columns, except for wide and combining characters.
size_t num_characters(std::string_view text);

/// The first `count` characters, or all if there are fewer.
std::string_view first_characters(std::string_view text, size_t count);

/// Control characters as \x1b, so that a terminal obeys nothing in a message. Line breaks and tabs
/// stay, unless `one_line`.
std::string without_control_characters(std::string_view text, bool one_line = false);

/// What a user gave (a key, a value, a file's name) for an error message: one line, with control characters
/// and bytes that are not UTF-8 as \x1b. Of more than 200 bytes the middle is left out, and how much it was
/// is said.
std::string abridged(std::string_view text, size_t longest = 200);

/// "'encoder.weight'": the same in quotes.
std::string quoted_name(std::string_view name);

}  // namespace tessera

// Properties of a terminal.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// Returns whether a terminal, by TERM, supports ECMA-48 control sequences, as most do: "\x1b[A" moves a line
/// up, "\x1b[J" erases from the cursor to the end of the screen, "\x1b[K" to the end of the line.
bool terminal_knows_sequences();

/// Current number of columns of the terminal of a file descriptor; 80 if unknown.
int terminal_width(int fd);

/// Breaks lines of `text` longer than `width` columns at spaces; lines after a break are indented by
/// `indent`. Longer words are not broken.
std::string wrap_words(std::string_view text, int width, int indent);

}  // namespace tessera

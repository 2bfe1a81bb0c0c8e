// What a terminal can do.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// Local. By TERM, whether a terminal knows ECMA-48's control sequences, as all but the simplest do: "\x1b[A"
/// goes a line up, "\x1b[J" erases from the cursor to the end of the screen, "\x1b[K" to the end of the line.
bool terminal_knows_sequences();

/// Local. Columns of the terminal behind a file descriptor, as it is now; 80 where that is unknown.
int terminal_width(int fd);

/// Local. Lines of `text` that are longer than `width` columns are broken at spaces; what follows a break is
/// set in by `indent`. A word that is longer stays whole.
std::string wrap_words(std::string_view text, int width, int indent);

}  // namespace tessera

// What a terminal can do.
#pragma once

namespace tessera {

/// Local. By TERM, whether a terminal knows ECMA-48's control sequences, as all but the simplest do: "\x1b[A" goes a line up, "\x1b[J" erases
/// from the cursor to the end of the screen, "\x1b[K" to the end of the line.
bool terminal_knows_sequences();

/// Local. Columns of the terminal behind a file descriptor, as it is now; 80 where that is unknown.
int terminal_width(int fd);

}  // namespace tessera

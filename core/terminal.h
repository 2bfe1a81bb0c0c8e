// What a terminal can do.
#pragma once

#include <cstdlib>
#include <string_view>

namespace tessera {

/// Local. By TERM, whether a terminal knows ECMA-48's control sequences, as all but the simplest do: "\x1b[A" goes a line up, "\x1b[J" erases
/// from the cursor to the end of the screen, "\x1b[K" to the end of the line.
inline bool terminal_knows_sequences() {
  const char* term = std::getenv("TERM");
  return term != nullptr && *term != '\0' && std::string_view(term) != "dumb";
}

}  // namespace tessera

#include "core/terminal.h"

#include <sys/ioctl.h>

#include <algorithm>

#include "core/utf8.h"
#include "core/variables.h"

namespace tessera {

bool terminal_knows_sequences() {
  const auto term = text_variable("TERM");
  return term && *term != "dumb";
}

int terminal_width(int fd) {
  winsize size{};
  return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string wrap_words(std::string_view text, int width, int indent) {
  std::string wrapped;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = text.substr(begin, end - begin);
    int room = width;
    while (num_characters(line) > static_cast<size_t>(std::max(room, 1))) {
      const size_t fits = first_characters(line, static_cast<size_t>(std::max(room, 1)) + 1)
                              .size();  // the space itself may be beyond the width
      const size_t word = line.find_first_not_of(' ');
      size_t space = line.rfind(' ', fits - 1);
      if (space == line.npos || word == line.npos || space < word)
        space = line.find(' ', std::min(word, line.size()));
      if (space == line.npos) break;
      wrapped += line.substr(0, space);
      line.remove_prefix(std::min(line.find_first_not_of(' ', space), line.size()));
      if (line.empty()) break;
      wrapped += "\n" + std::string(static_cast<size_t>(indent), ' ');
      room = width - indent;
    }
    wrapped += line;
    if (end < text.size()) wrapped += '\n';
    begin = end + 1;
  }
  return wrapped;
}

}  // namespace tessera

#include "core/terminal.h"

#include <sys/ioctl.h>

#include <cstdlib>
#include <string_view>

namespace tessera {

bool terminal_knows_sequences() {
  const char* term = std::getenv("TERM");
  return term != nullptr && *term != '\0' && std::string_view(term) != "dumb";
}

int terminal_width(int fd) {
  winsize size{};
  return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace tessera

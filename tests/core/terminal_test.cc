#include "core/terminal.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/ioctl.h>

#include "core/file_descriptor.h"

namespace tessera {
namespace {

TEST(TerminalWidth, IsTheTerminals) {
  const FileDescriptor terminal(::posix_openpt(O_RDWR | O_NOCTTY));
  ASSERT_TRUE(terminal);
  const winsize size{.ws_row = 24, .ws_col = 132, .ws_xpixel = 0, .ws_ypixel = 0};
  ASSERT_EQ(::ioctl(terminal.get(), TIOCSWINSZ, &size), 0);
  EXPECT_EQ(terminal_width(terminal.get()), 132);
}

TEST(TerminalWidth, Is80WhereUnknown) {
  const FileDescriptor file(::open("/dev/null", O_RDWR));
  EXPECT_EQ(terminal_width(file.get()), 80);
  EXPECT_EQ(terminal_width(-1), 80);
  const FileDescriptor terminal(::posix_openpt(O_RDWR | O_NOCTTY));  // a new one says 0
  EXPECT_EQ(terminal_width(terminal.get()), 80);
}

}  // namespace
}  // namespace tessera

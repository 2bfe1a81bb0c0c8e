#include "core/terminal.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/ioctl.h>

#include "core/files/file_descriptor.h"

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

TEST(WrapWords, BreaksAtSpacesAndSetsIn) {
  EXPECT_EQ(wrap_words("one two three", 13, 2), "one two three");
  EXPECT_EQ(wrap_words("one two three", 12, 2), "one two\n  three");
  EXPECT_EQ(wrap_words("one two three", 7, 2), "one two\n  three");
  EXPECT_EQ(wrap_words("one two three", 6, 2), "one\n  two\n  three");
  EXPECT_EQ(wrap_words("label    one two three", 16, 9), "label    one two\n         three");
  EXPECT_EQ(wrap_words("a\none two\n", 5, 1), "a\none\n two\n");
  EXPECT_EQ(wrap_words("", 5, 1), "");
  EXPECT_EQ(wrap_words("ää ää ää", 5, 0), "ää ää\nää") << "columns, not bytes";
}

TEST(WrapWords, ALongWordStaysWhole) {
  EXPECT_EQ(wrap_words("see /a/very/long/path now", 10, 2), "see\n  /a/very/long/path\n  now");
  EXPECT_EQ(wrap_words("/a/very/long/path now", 10, 2), "/a/very/long/path\n  now");
  EXPECT_EQ(wrap_words("    indented words", 10, 6), "    indented\n      words");
  EXPECT_EQ(wrap_words("unbroken", 3, 2), "unbroken");
  EXPECT_EQ(wrap_words("one two", 0, 2), "one\n  two");
  EXPECT_EQ(wrap_words("one two      ", 7, 2), "one two");
}

}  // namespace
}  // namespace tessera

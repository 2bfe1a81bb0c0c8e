#include "core/utf8.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Utf8, IsWhatUnicodeSays) {
  for (const char* good : {"", "a", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
                           "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf", "größe.重み🙂"})
    EXPECT_TRUE(is_utf8(good)) << good;
  for (const char* bad : {"\x80", "\xc0\x80", "\xc1\xbf", "\xc2", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xe2\x82",
                          "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "a\xc3("})
    EXPECT_FALSE(is_utf8(bad)) << bad;
  EXPECT_TRUE(is_utf8(std::string_view("\0", 1)));
}

TEST(Utf8, CharactersAreCounted) {
  EXPECT_EQ(num_characters(""), 0u);
  EXPECT_EQ(num_characters("größe"), 5u);
  EXPECT_EQ(num_characters("█▏🙂"), 3u);
  EXPECT_EQ(num_characters("a\xff\xe2\x82"), 4u) << "each byte of no character is one";
}

TEST(Utf8, CutsBetweenCharacters) {
  EXPECT_EQ(first_characters("größe", 0), "");
  EXPECT_EQ(first_characters("größe", 3), "grö");
  EXPECT_EQ(first_characters("größe", 5), "größe");
  EXPECT_EQ(first_characters("größe", 99), "größe");
  EXPECT_EQ(first_characters("█▏🙂", 2), "█▏");
  EXPECT_EQ(first_characters("\xff\xe2\x82z", 2), "\xff\xe2");
  EXPECT_EQ(first_characters("", 1), "");
}

TEST(Utf8, ControlCharactersAreShown) {
  EXPECT_EQ(without_control_characters("größe: 重み\n\t🙂 \xff"), "größe: 重み\n\t🙂 \xff");
  EXPECT_EQ(without_control_characters("a\x1b[31mb\r\b\x7f"), "a\\x1b[31mb\\x0d\\x08\\x7f");
  EXPECT_EQ(without_control_characters(std::string_view("\0", 1)), "\\x00");
  EXPECT_EQ(without_control_characters("\xc2\x9b"
                                       "31m \xc2\xa0"),
            "\\x9b31m \xc2\xa0")
      << "U+009B begins a sequence too";
  EXPECT_EQ(without_control_characters("größe\n\t\x1b", /*one_line=*/true), "größe\\x0a\\x09\\x1b");
}

TEST(Utf8, QuotedIsOneShortLine) {
  EXPECT_EQ(quoted_name("encoder.weight"), "'encoder.weight'");
  EXPECT_EQ(quoted_name("重み\n\x7f\xff"), "'重み\\x0a\\x7f\\xff'");
  const std::string quoted = quoted_name(std::string(10'000, 'x'));
  EXPECT_EQ(quoted, "'" + std::string(150, 'x') + "… (9800 bytes more) …" + std::string(50, 'x') + "'");
  std::string odd(1'000, '\0');
  odd += "größe";
  EXPECT_EQ(abridged(odd, 8), "\\x00\\x00\\x00\\x00\\x00\\x00… (1000 bytes more) …e");
  EXPECT_EQ(abridged("ééé", 5), "éé… (2 bytes more) …") << "no half of a character";
}

}  // namespace
}  // namespace tessera

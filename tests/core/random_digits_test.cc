#include "core/random_digits.h"

#include <gtest/gtest.h>

#include <set>

namespace tessera {
namespace {

TEST(RandomDigits, AreHexadecimalAndDifferEachTime) {
  std::set<std::string> seen, digits;
  for (int i = 0; i < 1000; ++i) {
    const std::string text = random_digits(8);
    EXPECT_EQ(text.size(), 16U);
    EXPECT_EQ(text.find_first_not_of("0123456789abcdef"), std::string::npos) << text;
    EXPECT_TRUE(seen.insert(text).second) << text;
    for (const char digit : text) digits.insert(std::string(1, digit));
  }
  EXPECT_EQ(digits.size(), 16U);
  EXPECT_EQ(random_digits(0), "");
}

}  // namespace
}  // namespace tessera

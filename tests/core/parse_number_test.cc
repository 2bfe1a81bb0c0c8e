#include "core/parse_number.h"

#include <gtest/gtest.h>

#include <limits>

namespace tessera {
namespace {

TEST(ParseNumber, TakesAllOfATextOrNothing) {
  EXPECT_EQ(parse_number<int>("42"), 42);
  EXPECT_EQ(parse_number<int>("-42"), -42);
  EXPECT_EQ(parse_number<double>("2.5e1"), 25.0);
  for (const char* text : {"", " 1", "1 ", "+1", "1x", "x", "1.0", "2147483648", "-", "0x10"})
    EXPECT_EQ(parse_number<int>(text), std::nullopt) << text;
  EXPECT_EQ(parse_number<int64_t>("9223372036854775807"), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(parse_number<int64_t>("9223372036854775808"), std::nullopt);
}

TEST(ParseNumber, CountsBeginAtZero) {
  EXPECT_EQ(parse_count("0"), 0);
  EXPECT_EQ(parse_count("-1"), std::nullopt);
  EXPECT_EQ(parse_count<int>("2147483648"), std::nullopt);
}

TEST(ParseNumber, WhatFollowsIsLeft) {
  std::string_view text = "12,x";
  EXPECT_EQ(take_number<int>(text), 12);
  EXPECT_EQ(text, ",x");
  EXPECT_EQ(take_number<int>(text), std::nullopt);
  EXPECT_EQ(text, ",x") << "nothing was taken";
}

}  // namespace
}  // namespace tessera

#include "core/ascii.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(AsciiLower, ChangesAToZAlone) {
  EXPECT_EQ(ascii_lower("AdamW @[`{ Z9_\xc3\x84"), "adamw @[`{ z9_\xc3\x84");
  EXPECT_EQ(ascii_lower(""), "");
}

}  // namespace
}  // namespace tessera

// Broken files: whatever bytes a configuration is damaged by, reading ends in a
// value or in one line of ConfigError.
#include <gtest/gtest.h>

#include <random>
#include <sstream>

#include "engine/config/parse.h"
#include "tests/engine/config/config_testing.h"
#include "tests/support/files.h"

namespace tessera {
namespace {

/// One edit: a byte replaced, inserted or dropped, a piece copied elsewhere, or the end cut off.
std::string mutate(std::string text, std::mt19937& random) {
  auto below = [&](size_t n) { return n == 0 ? 0 : random() % n; };
  static const std::string kUseful = "{}[]\",:/*0123456789eE.-+ tfna\\u\n";
  size_t at = below(text.size());
  switch (below(6)) {
    case 0: text[at] = static_cast<char>(random() % 256); break;
    case 1: text[at] = kUseful[below(kUseful.size())]; break;
    case 2: text.insert(at, 1, kUseful[below(kUseful.size())]); break;
    case 3: text.erase(at, 1 + below(8)); break;
    case 4: text.insert(below(text.size()), text.substr(at, below(40))); break;
    case 5:
      if (below(8) == 0)
        text.resize(at);
      else
        text.erase(at, 1);
      break;
  }
  return text;
}

TEST(ConfigFuzz, RandomMutationsEndInAValueOrAConfigError) {
  const std::string original = read_text(TESSERA_SOURCE_DIR "/configs/ds_config_zero2.json");
  ASSERT_FALSE(original.empty());
  std::mt19937 random(20240607);
  int num_good = 0, num_bad = 0;
  for (int i = 0; i < 5000; ++i) {
    std::string text = original;
    for (size_t edits = 1 + random() % 3; edits-- > 0;)
      if (!text.empty()) text = mutate(text, random);
    std::string error = config_error([&] { parse_engine_config(text, {.world_size = 2}, "c.json"); });
    std::istringstream lines(error);  // of a mistake each
    for (std::string line; std::getline(lines, line);) EXPECT_TRUE(line.starts_with("c.json")) << error;
    (error.empty() ? num_good : num_bad) += 1;
  }
  // Both outcomes are met: most edits break the file, some only touch blanks or numbers.
  EXPECT_GT(num_good, 100);
  EXPECT_GT(num_bad, 2500);
}

}  // namespace
}  // namespace tessera

// docs/configuration.md says of every engine key what the table says.
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "engine/config/keys.h"
#include "tests/engine/config/schema.h"

namespace tessera::config {
namespace {

TEST(ConfigDocs, EveryKeyIsDocumentedAsTheTableHasIt) {
  std::ifstream in(TESSERA_SOURCE_DIR "/docs/configuration.md");
  ASSERT_TRUE(in);
  std::set<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.insert(line);
  KeyTable table = engine_keys();
  EXPECT_GT(table.keys().size(), 150u);
  for (const Key& key : table.keys())
    EXPECT_TRUE(lines.count(doc_row(key))) << "docs/configuration.md lacks this line:\n" << doc_row(key);
}

TEST(ConfigDocs, EveryKeyHasAReasonOrMeaning) {
  KeyTable table = engine_keys();
  for (const Key& key : table.keys()) {
    EXPECT_FALSE(key.doc.empty()) << key.path;
    EXPECT_EQ(key.doc.find('\n'), std::string::npos) << key.path;
  }
}

}  // namespace
}  // namespace tessera::config

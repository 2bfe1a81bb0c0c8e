// The key tables of a run's configuration against the example configurations, the schema and the
// documentation.
#include "train/task/trainer_config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "engine/config/arguments.h"
#include "engine/config/keys.h"
#include "tests/engine/config/schema.h"
#include "tests/support/files.h"

namespace tessera::train {
namespace {

using nlohmann::json;

TEST(TrainerConfig, ResolvedConfigurationReadsTheSame) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(TESSERA_SOURCE_DIR "/configs")) {
    if (entry.path().filename() == "schema.json") continue;
    SCOPED_TRACE(names.insert(entry.path().filename().string()).first->c_str());
    RunConfig run = load_run_config(entry.path().string(), 2, {"trainer.max_steps=null"});
    std::string text = dump_resolved(run);
    RunConfig again = parse_run_config(text, "resolved.json", 2);
    EXPECT_EQ(again.engine, run.engine);
    EXPECT_EQ(again.trainer, run.trainer);
    EXPECT_EQ(again.model.json(), run.model.resolved());
    EXPECT_EQ(dump_resolved(again), text);
    EXPECT_TRUE(again.report.warnings.empty());
  }
  for (const char* name : {"ds_config_zero2.json", "fashion_mnist.json", "gpt_110m.json", "gpt_33m.json",
                           "minimal.json", "segmentation.json", "text_classification.json"})
    EXPECT_TRUE(names.count(name)) << name;
}

TEST(TrainerConfig, ResolvedConfigurationHasEveryUsedKey) {
  json resolved =
      json::parse(dump_resolved(load_run_config(TESSERA_SOURCE_DIR "/configs/fashion_mnist.json", 2)));
  config::KeyTable table = run_keys();
  for (const config::Key& key : table.keys()) {
    if (key.use != config::Use::kUsed || !key.for_types.empty() || key.path.find("[]") != std::string::npos)
      continue;
    std::string pointer = "/" + key.path;
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    EXPECT_TRUE(resolved.contains(json::json_pointer(pointer))) << key.path;
  }
}

TEST(TrainerConfig, AProgramThatIsGivenAnArgumentOfTesseraTrainIsToldSo) {
  config::KeyTable engine = config::engine_keys(), run = run_keys();
  int found = 0;
  for (const config::Key& key : run.keys()) {
    if (engine.find_any(key.path) != nullptr) continue;
    for (const std::string& name : key.aliases) {
      if (name.find('.') != name.npos || engine.find_any(name) != nullptr) continue;
      ++found;
      EXPECT_FALSE(config::instead_of_argument(name).empty()) << name << ", which is " << key.path;
    }
  }
  EXPECT_GT(found, 15);
}

TEST(TrainerConfig, SchemaIsTheTables) {
  std::string expected = config::schema_text(run_keys());
  const std::string fresh = TESSERA_BUILD_DIR "/schema.json";
  if (read_text(TESSERA_SOURCE_DIR "/configs/schema.json") != expected) {
    std::ofstream(fresh) << expected;
    FAIL() << "configs/schema.json is not what the key tables say; the right one is in " << fresh;
  }
  json schema = json::parse(expected);
  config::KeyTable table = run_keys();
  for (const config::Key& key : table.keys()) {
    if (key.path.find("[]") != std::string::npos) continue;
    const json* at = &schema;
    for (std::stringstream path(key.path); path.good();) {
      std::string part;
      std::getline(path, part, '.');
      if (at->contains("anyOf")) at = &at->at("anyOf").front();  // a section that may be null
      ASSERT_TRUE(at->at("properties").contains(part)) << key.path;
      at = &at->at("properties").at(part);
    }
    EXPECT_TRUE(at->contains("description")) << key.path;
  }
}

TEST(TrainerConfig, DocumentationIsTheTables) {
  std::set<std::string> rows;
  config::KeyTable table = run_keys();
  for (const config::Key& key : table.keys()) rows.insert(config::doc_row(key));
  // A key that an engine alone accepts and ignores, and a run uses.
  const config::KeyTable engine = config::engine_keys();
  rows.insert(config::doc_row(*engine.find_any("dataloader_drop_last")));
  std::set<std::string> documented;
  std::ifstream in(TESSERA_SOURCE_DIR "/docs/configuration.md");
  ASSERT_TRUE(in);
  for (std::string line; std::getline(in, line);)
    if (line.rfind("| `", 0) == 0) {
      EXPECT_TRUE(rows.count(line)) << "no key of the tables is documented as\n" << line;
      EXPECT_TRUE(documented.insert(line).second) << "documented twice:\n" << line;
    }
  for (const std::string& row : rows)
    EXPECT_TRUE(documented.count(row)) << "docs/configuration.md lacks\n" << row;
}

}  // namespace
}  // namespace tessera::train

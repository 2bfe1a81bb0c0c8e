// What reading gives for the settings in configuration files of public repositories. in_the_wild.json has
// the settings of each file, with sorted keys, and what is expected: "accepted", with the keys that the
// warning lists, or the keys that are refused, each with the reason. A file whose keys and words all stand in
// other files is left out.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/str.h"
#include "engine/config/parse.h"
#include "tests/engine/config/config_testing.h"
#include "tests/support/files.h"

namespace tessera {
namespace {

using nlohmann::json;
using Reasons = std::map<std::string, std::string>;

/// The keys in an error about a file of one line, each with the rest of its line.
Reasons refused_keys(const std::string& error, const std::string& source) {
  const std::string start = source + ":1: ";
  Reasons keys;
  std::istringstream lines(error);
  for (std::string line; std::getline(lines, line);) {
    const size_t end = line.find(": ", start.size());
    if (!line.starts_with(start) || end == std::string::npos)
      ADD_FAILURE() << "names no key: " << line;
    else
      keys[line.substr(start.size(), end - start.size())] = line.substr(end + 2);
  }
  return keys;
}

void expect_refused(const Reasons& refused, const Reasons& expected) {
  for (const auto& [key, message] : refused)
    EXPECT_TRUE(expected.contains(key)) << "also refused: " << key << ": " << message;
  for (const auto& [key, reason] : expected) {
    const auto found = refused.find(key);
    if (found == refused.end())
      ADD_FAILURE() << "not refused: " << key;
    else
      EXPECT_NE(found->second.find(reason), std::string::npos) << key << ": " << found->second;
  }
}

std::vector<std::string> no_effect_warnings(const std::vector<std::string>& keys, const std::string& source) {
  if (keys.empty()) return {};
  const char* have = keys.size() == 1 ? "this DeepSpeed key has" : "these DeepSpeed keys have";
  return {str(source, ": ", have, " no effect in Tessera: ", join(keys, ", "))};
}

TEST(ConfigInTheWild, FilesAreAcceptedOrRefusedAsExpected) {
  const json table = json::parse(read_text(TESSERA_SOURCE_DIR "/tests/engine/config/in_the_wild.json"));
  EXPECT_GE(table.size(), 25u);
  for (const json& entry : table) {
    const std::string source =
        str(entry.at("repository").get<std::string>(), "/", entry.at("path").get<std::string>());
    SCOPED_TRACE(source);
    config::ConfigReport report;
    const std::string error = config_error([&] {
      parse_engine_config(entry.at("settings").dump(),
                          {.world_size = entry.value("world_size", 2), .report = &report}, source);
    });
    const json& expected = entry.at("expected");
    if (expected.is_object()) {
      expect_refused(refused_keys(error, source), expected.get<Reasons>());
      continue;
    }
    EXPECT_EQ(expected.get<std::string>(), "accepted");
    EXPECT_EQ(error, "");
    EXPECT_EQ(report.warnings,
              no_effect_warnings(entry.value("warnings", std::vector<std::string>()), source));
  }
}

}  // namespace
}  // namespace tessera

// What reading a configuration says, for tests/messages/messages_test.py: standard input has cases, each a
// line of JSON [driver, its words, bytes] and so many bytes of text; each answer is lines and a NUL byte.
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "core/error.h"
#include "engine/config/document/document.h"
#include "engine/config/parse.h"
#include "train/task/trainer_config.h"

namespace tessera {
namespace {

/// `words`: KEY=VALUE of --set, or the number of ranks.
void say(const std::string& driver, const std::vector<std::string>& words, const std::string& text) {
  config::ConfigReport report;
  ConfigOptions options{.report = &report};
  for (const std::string& word : words) {
    if (word.find('=') == word.npos)
      options.world_size = std::stoi(word);
    else
      options.overrides.push_back(word);
  }
  const std::string keys = "{\"train_batch_size\": 8, " + text + "}";
  if (driver == "document") {
    config::parse_document(text, "c.json");
  } else if (driver == "override") {
    config::Document document = config::parse_document(R"({"n": 3, "l": [0]})", "c.json");
    config::apply_overrides(document, {text});
  } else if (driver == "run") {
    train::parse_run_config(keys, "c.json", options.world_size);
  } else {
    parse_engine_config(driver == "keys" ? keys : text, options, "c.json");
  }
  for (const std::string& warning : report.warnings) std::cout << "warning: " << warning << "\n";
}

}  // namespace
}  // namespace tessera

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    const nlohmann::json header = nlohmann::json::parse(line);
    std::string text(header[2].get<size_t>(), '\0');
    std::cin.read(text.data(), static_cast<std::streamsize>(text.size()));
    try {
      tessera::say(header[0], header[1], text);
    } catch (const tessera::ConfigError& error) {
      std::istringstream lines(error.what());
      for (std::string one; std::getline(lines, one);) std::cout << "error: " << one << "\n";
    }
    std::cout << '\0' << std::flush;
  }
}

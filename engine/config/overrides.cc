// apply_overrides: `--set path=value` from the command line onto a Document.
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/str.h"
#include "engine/config/document.h"

namespace tessera::config {
namespace {

using nlohmann::json;

struct Step {
  std::string name;  // of a key, when index is npos
  size_t index = std::string::npos;
};

[[noreturn]] void fail(const std::string& override_text, const std::string& what) {
  throw ConfigError(str("--set ", printable(override_text), ": ", what));
}

/// "a.b[2].c" -> a, b, [2], c
std::vector<Step> split_path(const std::string& path, const std::string& override_text) {
  std::vector<Step> steps;
  size_t at = 0;
  auto malformed = [&] {
    fail(override_text, "expected PATH=VALUE with a path like zero_optimization.stage");
  };
  while (at < path.size()) {
    size_t end = path.find_first_of(".[", at);
    if (end == std::string::npos) end = path.size();
    if (end == at) malformed();
    steps.push_back({path.substr(at, end - at), std::string::npos});
    at = end;
    while (at < path.size() && path[at] == '[') {
      size_t close = path.find(']', at);
      if (close == std::string::npos || close == at + 1 || close - at > 8 ||
          path.find_first_not_of("0123456789", at + 1) != close)
        malformed();
      steps.push_back({"", static_cast<size_t>(std::stoul(path.substr(at + 1, close - at - 1)))});
      at = close + 1;
    }
    if (at == path.size()) break;
    if (path[at] != '.' || at + 1 == path.size()) malformed();
    ++at;
  }
  if (steps.empty()) malformed();
  return steps;
}

json read_value(const std::string& text) {
  try {
    return parse_value(text, "--set");
  } catch (const ConfigError&) {
    return text;  // a bare word: --set trainer.device=cpu
  }
}

void apply(Document& document, const std::string& override_text) {
  size_t equals = override_text.find('=');
  if (equals == std::string::npos || equals == 0)
    fail(override_text, "expected PATH=VALUE, e.g. --set zero_optimization.stage=3");
  std::string path = override_text.substr(0, equals);
  json* at = document.json.get();
  std::string done;
  for (const Step& step : split_path(path, override_text)) {
    if (step.index != std::string::npos) {
      if (!at->is_array() || step.index >= at->size())
        fail(override_text, str(done, " is ", describe_value(*at), ", which has no element ", step.index));
      at = &(*at)[step.index];
      done = child_path(done, step.index);
      continue;
    }
    if (at->is_null()) *at = json::object();
    if (!at->is_object())
      fail(override_text, str(done, " is ", describe_value(*at), ", not a section with keys"));
    done = child_path(done, step.name);
    if (!at->contains(step.name))
      document.origins.set_override(done);  // also a section that only this path brings
    at = &(*at)[step.name];
  }
  *at = read_value(override_text.substr(equals + 1));
  document.origins.set_override(path);
}

}  // namespace

void apply_overrides(Document& document, const std::vector<std::string>& overrides) {
  for (const std::string& text : overrides) apply(document, text);
}

}  // namespace tessera::config

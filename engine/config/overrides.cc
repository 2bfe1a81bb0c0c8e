// apply_overrides: `--set path=value` from the command line onto a Document.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/str.h"
#include "core/utf8.h"
#include "engine/config/document.h"

namespace tessera::config {
namespace {

using nlohmann::json;

/// A path in the order it is walked: "a.b[2].c" is {"a", "b", "[2]", "c"}; empty when it is malformed.
std::vector<std::string> split_path(const std::string& path) {
  std::vector<std::string> steps;
  for (size_t at = 0; at < path.size();) {
    if (path[at] == '[') {
      const size_t close = path.find(']', at);
      const bool is_index = close != path.npos && close > at + 1 && close - at <= 8 &&
                            path.find_first_not_of("0123456789", at + 1) == close;
      const char after = is_index && close + 1 < path.size() ? path[close + 1] : '.';
      if (!is_index || steps.empty() || (after != '.' && after != '[')) return {};
      steps.push_back(path.substr(at, close + 1 - at));
      at = close + 1;
    } else {
      if (path[at] == '.' && !steps.empty()) ++at;
      const size_t end = std::min(path.find_first_of(".[", at), path.size());
      if (end == at) return {};
      steps.push_back(path.substr(at, end - at));
      at = end;
    }
  }
  return steps;
}

json read_value(const std::string& text) {
  try {
    return parse_json(text, {.comments = true, .nul_in_strings = false});
  } catch (const JsonError&) {
    return text;  // a bare word: --set trainer.device=cpu
  }
}

void apply(Document& document, const std::string& override_text) {
  const auto fail = [&](const std::string& what) {
    throw ConfigError(str("--set ", without_control_characters(override_text, true), ": ", what));
  };
  const size_t equals = override_text.find('=');
  if (equals == std::string::npos || equals == 0)
    fail("expected PATH=VALUE, e.g. --set zero_optimization.stage=3");
  const std::string path = override_text.substr(0, equals);
  const std::vector<std::string> steps = split_path(path);
  if (steps.empty()) fail("expected PATH=VALUE with a path like zero_optimization.stage");
  json* at = document.json.get();
  std::string done;
  for (const std::string& step : steps) {
    if (step.front() == '[') {
      const size_t index = std::stoul(step.substr(1));
      if (!at->is_array() || index >= at->size())
        fail(str(done, " is ", describe_value(*at), ", which has no element ", index));
      at = &(*at)[index];
      done = child_path(done, index);
    } else {
      if (at->is_null()) *at = json::object();
      if (!at->is_object()) fail(str(done, " is ", describe_value(*at), ", not a section with keys"));
      done = child_path(done, step);
      if (!at->contains(step)) document.origins.set_override(done);  // a section only this path has, too
      at = &(*at)[step];
    }
  }
  *at = read_value(override_text.substr(equals + 1));
  document.origins.set_override(path);
}

}  // namespace

void apply_overrides(Document& document, const std::vector<std::string>& overrides) {
  for (const std::string& text : overrides) apply(document, text);
}

}  // namespace tessera::config

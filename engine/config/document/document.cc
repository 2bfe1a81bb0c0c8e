#include "engine/config/document/document.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>

#include "core/files/input_file.h"
#include "core/json/json_text.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::config {

using nlohmann::json;

namespace {

constexpr size_t kMaxFileBytes = 16 << 20;
/// More values than this are an error, because they would only take time: every parameter of a large model
/// may have a group of its own.
constexpr int64_t kMaxJsonValues = 100'000;

/// "source:line:column: …".
[[noreturn]] void fail_json(const JsonError& error, std::string_view text, const std::string& source) {
  if (error.kind() == JsonError::Kind::kEmpty)
    throw ConfigError(source, ": is empty; expected a JSON object");
  std::string_view before = text.substr(0, error.offset());
  if (before.starts_with("\xef\xbb\xbf")) before.remove_prefix(3);      // byte order mark
  const std::string_view line = before.substr(before.rfind('\n') + 1);  // npos + 1 is 0
  const auto column =
      std::ranges::count_if(line, [](char c) { return (c & 0xc0) != 0x80; });  // in characters
  throw ConfigError(source, ":", 1 + std::ranges::count(before, '\n'), ":", column + 1, ": ", error.what());
}

/// True when `path` is `prefix` or lies below it.
bool is_below(const std::string& path, const std::string& prefix) {
  return path.starts_with(prefix) &&
         (path.size() == prefix.size() || path[prefix.size()] == '.' || path[prefix.size()] == '[');
}

template <class Json>
Json* find_value(Json& root, const std::string& path) {
  Json* at = &root;
  for (size_t start = 0; start <= path.size();) {
    const size_t dot = std::min(path.find('.', start), path.size());
    if (!at->is_object()) return nullptr;
    const auto it = at->find(path.substr(start, dot - start));
    if (it == at->end()) return nullptr;
    at = &*it;
    start = dot + 1;
  }
  return at;
}

}  // namespace

void Origins::rename(const std::string& from, const std::string& to) {
  std::map<std::string, Origin> renamed;
  for (const auto& [path, origin] : origins_)
    renamed[is_below(path, from) ? to + path.substr(from.size()) : path] = origin;
  origins_ = std::move(renamed);
}

void Origins::set_override(const std::string& path) {
  std::erase_if(origins_, [&](const auto& entry) { return is_below(entry.first, path); });
  origins_[path] = {kOverride, next_++};
}

Origins::Origin Origins::origin_of(const std::string& path) const {
  for (std::string prefix = path; !prefix.empty();) {
    if (auto it = origins_.find(prefix); it != origins_.end()) return it->second;
    const size_t cut = prefix.find_last_of(".[");
    prefix.resize(cut == std::string::npos ? 0 : cut);
  }
  return {};
}

std::string Origins::where(const std::string& path) const {
  const int line = origin_of(path).line;
  return line == kNowhere ? source_ : line == kOverride ? override_source_ : str(source_, ":", line);
}

std::string Origins::message(const std::string& path, const std::string& text) const {
  return str(where(path), ": ", abridged(path), ": ", text);
}

void Origins::fail(const std::string& path, const std::string& text) const {
  throw KeyError(message(path, text), order(path));
}

void Problems::raise() const {
  if (lines_.empty()) return;
  std::vector<std::string> lines;
  for (const auto& [order, line] : lines_)
    if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(line);
  if (lines.size() > kMostShown) {
    const std::string more =
        str("… and ", is_full() ? "at least " : "", lines.size() - kMostShown, " more errors");
    lines.resize(kMostShown);
    lines.push_back(more);
  }
  throw ConfigError(join(lines, "\n"));
}

Document::Document() : json(std::make_unique<nlohmann::json>(nlohmann::json::object())) {}
Document::Document(Document&&) noexcept = default;
Document& Document::operator=(Document&&) noexcept = default;
Document::~Document() = default;

Document parse_document(std::string_view text, const std::string& source) {
  Document document;
  document.origins = Origins(source);
  try {
    *document.json = parse_json(
        text, {.name = "configuration", .hjson = true, .nul_in_strings = false, .max_values = kMaxJsonValues},
        [&](const std::string& path, int line) { document.origins.set_line(path, line); });
  } catch (const JsonError& error) {
    fail_json(error, text, source);
  }
  if (!document.json->is_object())
    throw ConfigError(source, ": found ", describe_value(*document.json),
                      "; expected an object {…} of configuration keys");
  return document;
}

Document read_document(const std::string& file) {
  std::error_code ignored;
  if (std::filesystem::is_directory(file, ignored))
    throw ConfigError(file, ": is a folder; expected a JSON file");
  std::string text(kMaxFileBytes + 1, '\0');
  try {
    const InputFile in(file);
    text.resize(in.read_some(0, std::as_writable_bytes(std::span(text))));
  } catch (const DiskError& error) {
    throw ConfigError(file, ": cannot be opened (", error.reason(), ")");
  }
  if (text.size() > kMaxFileBytes)
    throw ConfigError(file, ": is larger than 16 MiB; expected a JSON configuration");
  return parse_document(text, file);
}

const json* value_at(const json& root, const std::string& path) { return find_value(root, path); }
json* value_at(json& root, const std::string& path) { return find_value(root, path); }

json& make_value(Document& document, const std::string& path, const std::string& for_key) {
  json* at = document.json.get();
  size_t start = 0;
  for (size_t dot = path.find('.'); dot != std::string::npos; start = dot + 1, dot = path.find('.', start)) {
    at = &(*at)[path.substr(start, dot - start)];
    if (at->is_null()) *at = json::object();
    if (!at->is_object())
      document.origins.fail(path.substr(0, dot),
                            str("found ", describe_value(*at), "; expected a section {…} to hold ", for_key));
  }
  return (*at)[path.substr(start)];
}

std::string describe_value(const json& value) {
  std::string text = json_text(value);
  if (value.is_number_float() && !std::isfinite(value.get<double>())) text = str(value.get<double>());
  if (text.size() > 60) {
    size_t cut = 57;
    while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80)
      --cut;  // not inside a UTF-8 character
    text.resize(cut);
    text += "...";
  }
  switch (value.type()) {
    case json::value_t::null: return "null";
    case json::value_t::boolean: return text + " (a boolean)";
    case json::value_t::string: return text + " (a string)";
    case json::value_t::array: return text + " (a list)";
    case json::value_t::object: return text + " (a section)";
    default: return text + " (a number)";
  }
}

namespace {

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
    return parse_json(text, {.nul_in_strings = false});
  } catch (const JsonError&) {
    return text;  // a bare word: --set trainer.device=cpu
  }
}

void apply(Document& document, const std::string& override_text) {
  const auto fail = [&](const std::string& what) {
    throw ConfigError("--set ", abridged(override_text), ": ", what);
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
        fail(str(abridged(done), " is ", describe_value(*at), ", which has no element ", index));
      at = &(*at)[index];
      done = child_path(done, index);
    } else {
      if (at->is_null()) *at = json::object();
      if (!at->is_object())
        fail(str(abridged(done), " is ", describe_value(*at), ", not a section with keys"));
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

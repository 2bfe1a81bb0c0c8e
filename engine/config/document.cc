#include "engine/config/document.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>

#include "core/error.h"
#include "core/input_file.h"
#include "core/str.h"
#include "engine/config/json.h"

namespace tessera::config {

using nlohmann::json;

namespace {

constexpr size_t kMaxFileBytes = 16 << 20;

/// True when `path` is `prefix` or lies below it.
bool is_below(const std::string& path, const std::string& prefix) {
  return path.compare(0, prefix.size(), prefix) == 0 &&
         (path.size() == prefix.size() || path[prefix.size()] == '.' || path[prefix.size()] == '[');
}

std::string read_text(const std::string& file) {
  std::error_code ignored;
  if (std::filesystem::is_directory(file, ignored))
    throw ConfigError(str(file, ": is a folder; expected a JSON file"));
  try {
    const InputFile in(file);
    std::string text(kMaxFileBytes + 1, '\0');
    text.resize(in.read_some(0, std::as_writable_bytes(std::span(text))));
    if (text.size() > kMaxFileBytes)
      throw ConfigError(str(file, ": is larger than 16 MiB; expected a JSON configuration"));
    return text;
  } catch (const DiskError& error) {
    throw ConfigError(str(file, ": cannot be opened (", error.reason(), ")"));
  }
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
  std::map<std::string, Place> renamed;
  for (const auto& [path, place] : places_)
    renamed[is_below(path, from) ? to + path.substr(from.size()) : path] = place;
  places_ = std::move(renamed);
}

Origins::Place Origins::place_of(const std::string& path) const {
  for (std::string prefix = path; !prefix.empty();) {
    if (auto it = places_.find(prefix); it != places_.end()) return it->second;
    size_t cut = prefix.find_last_of(".[");
    prefix.resize(cut == std::string::npos ? 0 : cut);
  }
  return {};
}

std::string Origins::where(const std::string& path) const {
  const Place place = place_of(path);
  if (place.line == kNowhere) return source_;
  return place.line == kOverride ? "--set" : str(source_, ":", place.line);
}

void Problems::raise() const {
  if (lines_.empty()) return;
  std::vector<std::string> lines;
  for (const auto& [order, line] : lines_)
    if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(line);
  throw ConfigError(join(lines, "\n"));
}

Document::Document() : json(std::make_unique<nlohmann::json>(nlohmann::json::object())) {}
Document::Document(Document&&) noexcept = default;
Document& Document::operator=(Document&&) noexcept = default;
Document::~Document() = default;

void Document::fail(const std::string& path, const std::string& text) const {
  throw KeyError(str(origins.where(path), ": ", printable(path), ": ", text), origins.order(path));
}

Document parse_document(std::string_view text, const std::string& source) {
  Document document;
  document.origins = Origins(source);
  *document.json = parse_json(text, source, &document.origins);
  if (!document.json->is_object())
    throw ConfigError(str(source, ": found ", describe_value(*document.json),
                          "; expected an object {…} of configuration keys"));
  return document;
}

Document read_document(const std::string& file) { return parse_document(read_text(file), file); }

nlohmann::json parse_value(std::string_view text, const std::string& source) {
  return parse_json(text, source, nullptr);
}

const json* value_at(const json& root, const std::string& path) { return find_value(root, path); }
json* value_at(json& root, const std::string& path) { return find_value(root, path); }

json& make_place(Document& document, const std::string& path, const std::string& for_key) {
  json* at = document.json.get();
  size_t start = 0;
  for (size_t dot = path.find('.'); dot != std::string::npos; start = dot + 1, dot = path.find('.', start)) {
    at = &(*at)[path.substr(start, dot - start)];
    if (at->is_null()) *at = json::object();
    if (!at->is_object())
      document.fail(path.substr(0, dot),
                    str("found ", describe_value(*at), "; expected a section {…} to hold ", for_key));
  }
  return (*at)[path.substr(start)];
}

std::string describe_value(const json& value) {
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
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

std::string printable(std::string_view path) {
  std::string out;
  for (char c : path) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\x%02x", static_cast<unsigned char>(c));
      out += escaped;
    } else {
      out += c;
    }
  }
  return out;
}

std::string child_path(const std::string& parent, const std::string& name) {
  return parent.empty() ? name : str(parent, ".", name);
}
std::string child_path(const std::string& parent, size_t index) { return str(parent, "[", index, "]"); }

}  // namespace tessera::config

#include "tests/engine/config/schema.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/json/json_reader.h"
#include "core/str.h"

namespace tessera::config {
namespace {

using nlohmann::ordered_json;

void add_range(const Range& range, ordered_json& schema) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto bound = [](double value) {  // 3, not 3.0
    const bool whole = std::trunc(value) == value && std::abs(value) < 1e15;
    return whole ? ordered_json(static_cast<int64_t>(value)) : ordered_json(value);
  };
  if (range.min > -kInfinity) schema[range.above_min ? "exclusiveMinimum" : "minimum"] = bound(range.min);
  if (range.max < kInfinity) schema[range.below_max ? "exclusiveMaximum" : "maximum"] = bound(range.max);
}

ordered_json number_schema(const Key& key, const char* type) {
  ordered_json schema = {{"type", type}};
  add_range(key.range, schema);
  return schema;
}

ordered_json one_or_list(const ordered_json& item) {
  const ordered_json list = {{"type", "array"}, {"items", item}, {"minItems", 1}};
  return {{"anyOf", {item, list}}};
}

ordered_json choice_schema(const Key& key) {
  std::vector<std::string> choices = key.choices;
  for (const auto& [alias, choice] : key.choice_aliases) choices.push_back(alias);
  return {{"type", "string"}, {"examples", choices}};
}

ordered_json section_schema(const KeyTable& table, const std::string& path, bool open);
ordered_json key_schema(const KeyTable& table, const Key& key);

ordered_json value_schema(const KeyTable& table, const Key& key) {
  switch (key.type) {
    case Type::kBool: return {{"type", "boolean"}};
    case Type::kInteger: return number_schema(key, "integer");
    case Type::kNumber: return number_schema(key, "number");
    case Type::kChoice: return choice_schema(key);
    case Type::kChoiceList: return one_or_list(choice_schema(key));
    case Type::kText: return {{"type", "string"}};
    case Type::kPair:
      return {{"type", "array"}, {"items", number_schema(key, "number")}, {"minItems", 2}, {"maxItems", 2}};
    case Type::kNumberList: return one_or_list(number_schema(key, "number"));
    case Type::kTextList: return one_or_list({{"type", "string"}});
    case Type::kNumbersOrTexts: return one_or_list({{"type", {"number", "string"}}});
    case Type::kOpenSection: return {{"type", "object"}};
    case Type::kSection: return section_schema(table, key.path, false);
    case Type::kFreeSection: return section_schema(table, key.path, true);
    case Type::kSectionList:
      return {{"type", "array"}, {"items", section_schema(table, key.path + "[]", false)}};
  }
  return {};
}

ordered_json key_schema(const KeyTable& table, const Key& key) {
  ordered_json schema = value_schema(table, key);
  ordered_json others = ordered_json::array();
  if (key.takes_auto()) others.push_back({{"const", "auto"}});
  if (key.nullable) others.push_back({{"type", "null"}});
  if (!others.empty()) {
    others.insert(others.begin(), schema);
    schema = {{"anyOf", others}};
  }
  std::string doc = key.doc;
  if (key.use == Use::kNoEffect) doc = "No effect in Tessera: " + doc;
  if (key.use == Use::kRefused) doc = "Refused by Tessera when it asks for something: " + doc;
  schema["description"] = doc;
  if (key.use == Use::kUsed && key.default_json != "null")
    schema["default"] = parse_ordered_json(key.default_json);
  return schema;
}

ordered_json section_schema(const KeyTable& table, const std::string& path, bool open) {
  ordered_json properties = ordered_json::object(), required = ordered_json::array();
  for (const Key* key : table.children(path)) {
    // Rows of one name differ only in their default by type; the first one is used.
    if (!properties.contains(key->name())) properties[key->name()] = key_schema(table, *key);
    if (key->required && key->for_types.empty()) required.push_back(key->name());
  }
  for (const Key& key : table.keys())
    for (const std::string& alias : key.aliases)
      if (Key{.path = alias}.parent() == path)
        properties[Key{.path = alias}.name()] = {{"description", "Another name of " + key.path}};
  ordered_json schema = {{"type", "object"}, {"properties", properties}};
  if (!required.empty()) schema["required"] = required;
  if (!open) schema["patternProperties"] = {{"^_", ordered_json::object()}};  // comments
  schema["additionalProperties"] = open;
  return schema;
}

std::string escape_pipes(std::string text) {
  for (size_t at = text.find('|'); at != std::string::npos; at = text.find('|', at + 2))
    text.insert(at, 1, '\\');
  return text;
}

std::string default_text(const Key& key) {
  if (key.required) return "required";
  bool is_section = key.type == Type::kSection || key.type == Type::kFreeSection;
  if (is_section) return "";
  if (key.default_json == "null") return key.nullable ? "`null`" : "not set";
  return str("`", key.default_json, "`");
}

}  // namespace

std::string schema_text(const KeyTable& table) {
  ordered_json schema = {
      {"$schema", "http://json-schema.org/draft-07/schema#"},
      {"title", "Tessera configuration (DeepSpeed's ds_config.json, and the sections model, data, trainer)"}};
  ordered_json root = section_schema(table, "", false);
  for (const auto& [name, value] : root.items()) schema[name] = value;
  return schema.dump(1) + "\n";
}

std::string doc_row(const Key& key) {
  std::string meaning = key.doc;
  if (!key.for_types.empty()) meaning = str(join(key.for_types, ", "), ": ", meaning);
  if (key.use == Use::kRefused && !key.harmless.empty() && key.switch_key.empty())
    meaning += str("; accepted when ", join(key.harmless, " or "));
  if (!key.switch_key.empty())
    meaning += str("; off when `", key.switch_key, "` is ", join(key.harmless, " or "));
  if (key.per_group) meaning += " (per group)";
  if (!key.aliases.empty()) meaning += str(". Also as `", join(key.aliases, "`, `"), "`");
  if (key.takes_auto() && (key.auto_json != key.default_json || !key.auto_doc.empty()))
    meaning += str(". \"auto\": ", key.auto_doc.empty() ? str("`", key.auto_json, "`") : key.auto_doc);
  if (!key.has_effect())
    return str("| `", key.path, "` | ", escape_pipes(accepted(key)), " | ", escape_pipes(meaning), " |");
  std::string fallback = default_text(key);
  return str("| `", key.path, "` | ", escape_pipes(accepted(key)), " | ", fallback,
             fallback.empty() ? "" : " ", "| ", escape_pipes(meaning), " |");
}

}  // namespace tessera::config

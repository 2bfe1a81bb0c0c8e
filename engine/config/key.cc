#include "engine/config/key.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/ascii.h"
#include "core/check.h"
#include "core/str.h"
#include "engine/config/document.h"
#include "engine/config/suggest.h"

namespace tessera::config {
namespace {

using nlohmann::json;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kMaxInteger = 9.2233720368547758e18;  // 2^63

Key make(std::string path, Type type) {
  Key key;
  key.path = std::move(path);
  key.type = type;
  return key;
}

bool in_range(const Key& key, double value) {
  return (key.above_min ? value > key.min : value >= key.min) &&
         (key.below_max ? value < key.max : value <= key.max);
}

bool is_integer(const json& value) {
  if (!value.is_number()) return false;
  if (value.is_number_unsigned()) return value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
  if (value.is_number_integer()) return true;
  double number = value.get<double>();
  return std::trunc(number) == number && std::abs(number) < kMaxInteger;
}

bool all_of(const json& list, bool (*check)(const Key&, const json&), const Key& key) {
  return std::all_of(list.begin(), list.end(), [&](const json& item) { return check(key, item); });
}
bool number_fits(const Key& key, const json& value) {
  return value.is_number() && in_range(key, value.get<double>());
}
bool text_fits(const Key&, const json& value) { return value.is_string(); }

bool fits(const Key& key, const json& value) {
  switch (key.type) {
    case Type::kBool: return value.is_boolean();
    case Type::kInteger: return is_integer(value) && in_range(key, value.get<double>());
    case Type::kNumber: return number_fits(key, value);
    case Type::kWord: return value.is_string() && !canonical_word(key, value.get<std::string>()).empty();
    case Type::kText: return value.is_string();
    case Type::kPair: return value.is_array() && value.size() == 2 && all_of(value, number_fits, key);
    case Type::kNumberList:
      return number_fits(key, value) ||
             (value.is_array() && !value.empty() && all_of(value, number_fits, key));
    case Type::kTextList:
      return value.is_string() || (value.is_array() && !value.empty() && all_of(value, text_fits, key));
    case Type::kSection:
    case Type::kOpenSection:
    case Type::kFreeSection: return value.is_object();
    case Type::kSectionList:
      return value.is_array() &&
             std::all_of(value.begin(), value.end(), [](const json& item) { return item.is_object(); });
  }
  return false;
}

/// A bound as a person would write it: 3, 0.5, 1e9.
std::string plain(double value) {
  std::string text = str(value);  // six digits: 1e+09
  if (size_t plus = text.find("e+"); plus != std::string::npos) {
    size_t digits = text.find_first_not_of('0', plus + 2);
    text = text.substr(0, plus) + "e" + text.substr(digits);
  }
  return text;
}

std::string range_text(const Key& key) {
  bool low = key.min > -kInfinity, high = key.max < kInfinity;
  if (low && high && key.above_min) return str(" above ", plain(key.min), " and up to ", plain(key.max));
  if (low && high && key.below_max) return str(" from ", plain(key.min), " to below ", plain(key.max));
  if (low && high) return str(" from ", plain(key.min), " to ", plain(key.max));
  if (low && key.above_min) return str(" above ", plain(key.min));
  if (low) return str(" of at least ", plain(key.min));
  if (high) return str(" of at most ", plain(key.max));
  return "";
}

std::string type_text(const Key& key) {
  switch (key.type) {
    case Type::kBool: return "true or false";
    case Type::kInteger: return "an integer" + range_text(key);
    case Type::kNumber: return "a number" + range_text(key);
    case Type::kWord: {
      std::vector<std::string> quoted;
      for (const std::string& word : key.words) quoted.push_back(str('"', word, '"'));
      return (quoted.size() > 1 ? "one of " : "") + join(quoted, ", ");
    }
    case Type::kText: return "a string";
    case Type::kPair:
      return str("a list of two numbers", key.min > -kInfinity ? ", each" : "", range_text(key));
    case Type::kNumberList:
      return str("a number", range_text(key), ", or a list with one for every param group");
    case Type::kTextList: return "a string or a list of strings";
    case Type::kSection:
    case Type::kOpenSection:
    case Type::kFreeSection: return "a section {…}";
    case Type::kSectionList: return "a list of sections [{…}, …]";
  }
  return "";
}

}  // namespace

Key& Key::range(double low, double high) {
  min = low;
  max = high;
  return *this;
}
Key& Key::above(double low) {
  min = low;
  above_min = true;
  return *this;
}
Key& Key::below() {
  below_max = true;
  return *this;
}
Key& Key::says(std::string text) {
  doc = std::move(text);
  return *this;
}
Key& Key::or_null() {
  nullable = true;
  return *this;
}
Key& Key::must() {
  required = true;
  return *this;
}
Key& Key::fallback(std::string json_text) {
  default_json = std::move(json_text);
  return *this;
}
Key& Key::takes_auto(std::string json_text, std::string in_words) {
  auto_json = std::move(json_text);
  auto_doc = std::move(in_words);
  return *this;
}
Key& Key::also(std::string other_path) {
  other_names.push_back(std::move(other_path));
  return *this;
}
Key& Key::also_argument(const std::string& argument) {
  for (const std::string& other : {argument, "trainer." + argument})
    if (other != path && std::find(other_names.begin(), other_names.end(), other) == other_names.end())
      other_names.push_back(other);
  return *this;
}
Key& Key::also_word(std::string other, std::string word) {
  other_words[ascii_lower(other)] = std::move(word);
  return *this;
}
Key& Key::refuses_word(std::string word, std::string reason) {
  refused_words[ascii_lower(word)] = std::move(reason);
  return *this;
}
Key& Key::no_effect(std::string why) {
  use = Use::kNoEffect;
  doc = std::move(why);
  return *this;
}
Key& Key::refused(std::string why, std::vector<std::string> unless) {
  use = Use::kRefused;
  doc = std::move(why);
  harmless = std::move(unless);
  return *this;
}
Key& Key::switched_by(std::string name, std::vector<std::string> off_values) {
  switch_name = std::move(name);
  harmless = std::move(off_values);
  return *this;
}
Key& Key::of(std::vector<std::string> for_variants) {
  variants = std::move(for_variants);
  return *this;
}
Key& Key::in_groups() {
  per_group = true;
  return *this;
}

std::string Key::name() const { return path.substr(path.rfind('.') + 1); }
std::string Key::parent() const {
  size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

Key boolean(std::string path) { return make(std::move(path), Type::kBool); }
Key integer(std::string path) { return make(std::move(path), Type::kInteger); }
Key number(std::string path) { return make(std::move(path), Type::kNumber); }
Key word(std::string path, std::vector<std::string> words) {
  Key key = make(std::move(path), Type::kWord);
  key.words = std::move(words);
  return key;
}
Key text(std::string path) { return make(std::move(path), Type::kText); }
Key pair(std::string path) { return make(std::move(path), Type::kPair); }
Key number_list(std::string path) { return make(std::move(path), Type::kNumberList); }
Key text_list(std::string path) { return make(std::move(path), Type::kTextList); }
Key section(std::string path) { return make(std::move(path), Type::kSection); }
Key section_list(std::string path) { return make(std::move(path), Type::kSectionList); }
Key open_section(std::string path) { return make(std::move(path), Type::kOpenSection); }
Key free_section(std::string path) { return make(std::move(path), Type::kFreeSection); }

void KeyTable::add(Key key) {
  auto overlap = [&](const Key& other) {
    return key.variants.empty() || other.variants.empty() ||
           std::any_of(key.variants.begin(), key.variants.end(), [&](const std::string& variant) {
             return std::find(other.variants.begin(), other.variants.end(), variant) != other.variants.end();
           });
  };
  for (const Key& other : keys_)
    TESSERA_CHECK(other.path != key.path || !overlap(other), "key declared twice: ", key.path);
  TESSERA_CHECK(key.parent().empty() || key.path.find("[]") != std::string::npos || find_any(key.parent()),
                "key declared before its section: ", key.path);
  keys_.push_back(std::move(key));
}
void KeyTable::add(std::vector<Key> keys) {
  for (Key& key : keys) add(std::move(key));
}
void KeyTable::add(const KeyTable& other) {
  for (const Key& key : other.keys_) add(key);
}

const Key* KeyTable::find(const std::string& path, const std::string& variant) const {
  for (const Key& key : keys_)
    if (key.path == path && (key.variants.empty() || std::find(key.variants.begin(), key.variants.end(),
                                                               variant) != key.variants.end()))
      return &key;
  return nullptr;
}

const Key* KeyTable::find_any(const std::string& path) const {
  for (const Key& key : keys_)
    if (key.path == path) return &key;
  return nullptr;
}

std::vector<const Key*> KeyTable::children(const std::string& parent, const std::string& variant) const {
  std::vector<const Key*> found;
  for (const Key& key : keys_)
    if (key.parent() == parent && find(key.path, variant) == &key) found.push_back(&key);
  return found;
}

std::vector<std::string> KeyTable::paths_named(const std::string& name) const {
  std::vector<std::string> paths;
  for (const Key& key : keys_)
    if (key.name() == name && std::find(paths.begin(), paths.end(), key.path) == paths.end())
      paths.push_back(key.path);
  return paths;
}

std::string accepted(const Key& key) {
  std::string text = type_text(key);
  if (key.takes_word_auto()) text += ", or \"auto\"";
  if (key.nullable) text += ", or null";
  return text;
}

std::string canonical_word(const Key& key, const std::string& written) {
  std::string low = ascii_lower(written);
  for (const std::string& word : key.words)
    if (ascii_lower(word) == low) return word;
  auto it = key.other_words.find(low);
  return it == key.other_words.end() ? "" : it->second;
}

std::string mismatch(const Key& key, const json& value) {
  if (value.is_null() && key.nullable) return "";
  if (key.takes_word_auto() && value == "auto") return "";
  if (fits(key, value)) return "";
  std::string found = str("found ", describe_value(value));
  if (key.type == Type::kWord && value.is_string()) {
    const auto& written = value.get_ref<const std::string&>();
    if (auto it = key.refused_words.find(ascii_lower(written)); it != key.refused_words.end())
      return str(found, ", which Tessera does not have: ", it->second, "; expected ", accepted(key));
    return str(found, "; expected ", accepted(key), did_you_mean(written, key.words));
  }
  return str(found, "; expected ", accepted(key));
}

}  // namespace tessera::config

#include "engine/config/key.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "core/ascii.h"
#include "core/check.h"
#include "core/str.h"
#include "engine/config/document/document.h"
#include "engine/config/document/suggest.h"

namespace tessera::config {
namespace {

using nlohmann::json;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool is_integer(const json& value) {
  if (value.is_number_unsigned()) return value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
  if (!value.is_number_float()) return value.is_number();
  const double number = value.get<double>();
  return std::trunc(number) == number && std::abs(number) < 0x1p63;
}

/// What is wrong with a value of a kChoiceList; else "".
std::string choice_list_problem(const Key& key, const json& value) {
  const std::string found = "found " + describe_value(value);
  if (!value.is_string() && !value.is_array()) return found;
  if (value.empty()) return str(found, ", which is empty");
  std::set<std::string> before;
  for (const json& item : value.is_array() ? value : json::array({value})) {
    if (!item.is_string()) return str(found, " with ", describe_value(item));
    const std::string written = item.get<std::string>(), choice = canonical_choice(key, written);
    if (choice.empty())
      return str(found, value.is_array() ? " with " + describe_value(item) : "",
                 did_you_mean(written, key.choices));
    if (!before.insert(choice).second) return str(found, " with \"", choice, "\" twice");
  }
  return "";
}

bool fits(const Key& key, const json& value) {
  const auto is_number = [&](const json& item) {
    return item.is_number() && std::isfinite(item.get<double>()) && key.range.contains(item.get<double>());
  };
  const auto all_of = [&](const auto& check) {
    return value.is_array() && !value.empty() && std::all_of(value.begin(), value.end(), check);
  };
  switch (key.type) {
    case Type::kBool: return value.is_boolean();
    case Type::kInteger: return is_integer(value) && is_number(value);
    case Type::kNumber: return is_number(value);
    case Type::kChoice: return value.is_string() && !canonical_choice(key, value.get<std::string>()).empty();
    case Type::kChoiceList: return choice_list_problem(key, value).empty();
    case Type::kText: return value.is_string();
    case Type::kPair: return value.size() == 2 && all_of(is_number);
    case Type::kNumberList: return is_number(value) || all_of(is_number);
    case Type::kTextList:
      return value.is_string() || all_of([](const json& item) { return item.is_string(); });
    case Type::kNumbersOrTexts:
      return value.is_string() || is_number(value) ||
             all_of([&](const json& item) { return item.is_string() || is_number(item); });
    case Type::kSection:
    case Type::kOpenSection:
    case Type::kFreeSection: return value.is_object();
    case Type::kSectionList:
      return value == json::array() || all_of([](const json& item) { return item.is_object(); });
  }
  return false;
}

/// A bound as a person would write it: 3, 0.5, 1e9.
std::string plain(double value) {
  std::string text = str(value);  // six digits: 1e+09
  if (const size_t plus = text.find("e+"); plus != std::string::npos)
    text = text.substr(0, plus) + "e" + text.substr(text.find_first_not_of('0', plus + 2));
  return text;
}

std::string range_text(const Range& range) {
  const bool low = range.min > -kInfinity, high = range.max < kInfinity;
  if (low && high)
    return str(" from ", plain(range.min), range.below_max ? " to below " : " to ", plain(range.max));
  if (low) return str(range.above_min ? " above " : " of at least ", plain(range.min));
  return high ? str(" of at most ", plain(range.max)) : "";
}

std::string type_text(const Key& key) {
  const std::string range = range_text(key.range);
  switch (key.type) {
    case Type::kBool: return "true or false";
    case Type::kInteger: return "an integer" + range;
    case Type::kNumber: return "a number" + range;
    case Type::kChoice:
      return str(key.choices.size() > 1 ? "one of \"" : "\"", join(key.choices, "\", \""), '"');
    case Type::kChoiceList: return str("a list of some of \"", join(key.choices, "\", \""), "\", each once");
    case Type::kText: return "a string";
    case Type::kPair: return str("a list of two numbers", range.empty() ? "" : ", each", range);
    case Type::kNumberList: return str("a number", range, ", or a list with one for every param group");
    case Type::kTextList: return "a string or a list of strings";
    case Type::kNumbersOrTexts: return "a number, a string, or a list of them";
    case Type::kSection:
    case Type::kOpenSection:
    case Type::kFreeSection: return "a section {…}";
    case Type::kSectionList: return "a list of sections [{…}, …]";
  }
  return "";
}

// What a target accepts, and its value from and to JSON.

constexpr Type type_for(const bool*) { return Type::kBool; }
constexpr Type type_for(const int*) { return Type::kInteger; }
constexpr Type type_for(const int64_t*) { return Type::kInteger; }
constexpr Type type_for(const double*) { return Type::kNumber; }
constexpr Type type_for(const std::string*) { return Type::kText; }
constexpr Type type_for(const DType*) { return Type::kChoice; }
template <class T>
constexpr Type type_for(const std::optional<T>*) {
  return type_for(static_cast<const T*>(nullptr));
}
constexpr Type type_for(const std::array<double*, 2>&) { return Type::kPair; }
constexpr Type type_for(const std::vector<double>*) { return Type::kNumberList; }
constexpr Type type_for(const std::vector<std::string>*) { return Type::kTextList; }

template <class T>
void from_json(const json& value, T* member) {
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>)
    *member = value.is_null() ? 0 : static_cast<T>(value.get<int64_t>());  // 5e8 is 500000000
  else if constexpr (std::is_same_v<T, DType>)
    *member = *parse_dtype(value.get<std::string>());
  else
    *member = value.get<T>();
}
template <class T>
void from_json(const json& value, std::optional<T>* member) {
  member->reset();
  if (!value.is_null()) from_json(value, &member->emplace());
}
void from_json(const json& value, const std::array<double*, 2>& members) {
  for (size_t i = 0; i < members.size(); ++i) *members[i] = value[i].get<double>();
}
void from_json(const json& value, std::vector<double>* member) {
  member->clear();
  if (value.is_array())
    *member = value.get<std::vector<double>>();
  else if (!value.is_null())
    member->push_back(value.get<double>());
}
void from_json(const json& value, std::vector<std::string>* member) {
  member->clear();
  if (value.is_string())
    member->push_back(value.get<std::string>());
  else if (!value.is_null())
    *member = value.get<std::vector<std::string>>();
}

template <class T>
json to_json(const T* member) {
  return *member;
}
json to_json(const DType* member) { return std::string(name_of(*member)); }
template <class T>
json to_json(const std::optional<T>* member) {
  return *member ? to_json(&**member) : json(nullptr);
}
json to_json(const std::array<double*, 2>& members) { return {*members[0], *members[1]}; }
json to_json(const std::vector<double>* member) {
  return member->empty() ? json(nullptr) : member->size() == 1 ? json(member->front()) : json(*member);
}
json to_json(const std::vector<std::string>* member) {
  return member->empty() ? json(nullptr) : json(*member);
}

/// "[0.9, 0.999]", with a space.
std::string text_of(const json& value) {
  if (!value.is_array()) return value.dump();
  std::vector<std::string> items;
  for (const json& item : value) items.push_back(item.dump());
  return "[" + join(items, ", ") + "]";
}

}  // namespace

std::string Key::name() const { return path.substr(path.rfind('.') + 1); }
std::string Key::parent() const {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}
bool Key::is_for(const std::string& type) const {
  return for_types.empty() || std::find(for_types.begin(), for_types.end(), type) != for_types.end();
}

// ------------------------------------------------------------------------------------------ attributes

static Attribute range(Range range) {
  return [range](Key& key) { key.range = range; };
}
Attribute at_least(double min) { return range({.min = min}); }
Attribute above(double min) { return range({.min = min, .above_min = true}); }
Attribute between(double min, double max) { return range({.min = min, .max = max}); }
Attribute from_to_below(double min, double max) { return range({.min = min, .max = max, .below_max = true}); }
Attribute choices(std::vector<std::string> choices, std::map<std::string, std::string> aliases) {
  return [=](Key& key) { key.type = Type::kChoice, key.choices = choices, key.choice_aliases = aliases; };
}
Attribute choice_list(std::vector<std::string> choices, std::map<std::string, std::string> aliases) {
  return [=](Key& key) { key.type = Type::kChoiceList, key.choices = choices, key.choice_aliases = aliases; };
}
Attribute auto_is(std::string json, std::string in_words) {
  return [=](Key& key) { key.auto_json = json, key.auto_doc = in_words; };
}
Attribute argument(const std::string& name) {
  return [=](Key& key) { key.aliases.insert(key.aliases.begin(), {name, "trainer." + name}); };
}
Attribute alias(std::string path) {
  return [=](Key& key) { key.aliases.push_back(path); };
}
Attribute of_type(Type type) {
  return [=](Key& key) { key.type = type; };
}

std::vector<std::string> split_names(const std::string& names) {
  std::istringstream in(names);
  return {std::istream_iterator<std::string>(in), {}};
}

// ---------------------------------------------------------------------------------------------- fields

Type Field::type_of(const Target& target) {
  return std::visit([](const auto& member) { return type_for(member); }, target);
}

std::vector<Field> in_section(const std::string& section, std::vector<Field> fields) {
  for (Field& field : fields) field.key.path = child_path(section, field.key.path);
  return fields;
}

void assign(const Field& field, const json& value) {
  json plain = value;
  if (field.key.takes_auto() && value == "auto") plain = nullptr;
  if (field.key.type == Type::kChoice && plain.is_string())
    plain = canonical_choice(field.key, plain.get<std::string>());
  if (field.key.type == Type::kChoiceList && !plain.is_null()) {
    if (plain.is_string()) plain = json::array({plain});
    for (json& item : plain) item = canonical_choice(field.key, item.get<std::string>());
  }
  std::visit([&](const auto& member) { from_json(plain, member); }, field.target);
}

std::string assign_or_auto(const Field& field, const json& value) {
  const Key& key = field.key;
  if (!key.takes_auto() || value != "auto") return assign(field, value), "";
  const std::string meaning = key.auto_json == "default" ? text_of(value_of(field)) : key.auto_json;
  assign(field, parse_json(meaning));
  return key.auto_doc.empty() ? meaning : key.auto_doc;
}

json value_of(const Field& field) {
  const json value = std::visit([](const auto& member) { return to_json(member); }, field.target);
  return value.is_null() && field.key.auto_json == "\"auto\"" ? json("auto") : value;
}

std::vector<Key> keys_of(std::vector<Field> defaults) {
  std::vector<Key> keys;
  for (Field& field : defaults) {
    if (!field.key.required) field.key.default_json = text_of(value_of(field));
    if (field.key.auto_json == "default") field.key.auto_json = field.key.default_json;
    keys.push_back(std::move(field.key));
  }
  return keys;
}

// ---------------------------------------------------------------------------------------------- values

std::string accepted(const Key& key) {
  return str(type_text(key), key.takes_auto() ? ", or \"auto\"" : "", key.nullable ? ", or null" : "");
}

std::string canonical_choice(const Key& key, const std::string& written) {
  const std::string low = ascii_lower(written);
  for (const std::string& choice : key.choices)
    if (ascii_lower(choice) == low) return choice;
  const auto alias = key.choice_aliases.find(low);
  return alias == key.choice_aliases.end() ? "" : alias->second;
}

std::string mismatch(const Key& key, const json& value) {
  if (key.nullable && (value.is_null() || (key.type == Type::kTextList && value == json::array()))) return "";
  if (key.takes_auto() && value == "auto") return "";
  if (fits(key, value)) return "";
  if (key.type == Type::kChoiceList)
    return str(choice_list_problem(key, value), "; expected ", accepted(key));
  std::string reason, hint;
  if (key.type == Type::kChoice && value.is_string()) {
    const std::string written = value.get<std::string>();
    const auto refused = key.refused_choices.find(ascii_lower(written));
    if (refused != key.refused_choices.end())
      reason = ", which Tessera does not have: " + refused->second;
    else
      hint = did_you_mean(written, key.choices);
  }
  return str("found ", describe_value(value), reason, "; expected ", accepted(key), hint);
}

std::vector<Key> merged_keys(const std::vector<std::pair<std::string, std::vector<Key>>>& types) {
  std::vector<Key> merged;
  for (const auto& [type, keys] : types) {
    auto place = merged.begin();  // rows of one type keep their order
    for (const Key& key : keys) {
      const auto equal = std::find_if(merged.begin(), merged.end(), [&](Key row) {
        row.for_types.clear();
        return row == key;
      });
      if (equal != merged.end()) {
        equal->for_types.push_back(type);
        place = equal + 1;
        continue;
      }
      const auto other =
          std::find_if(merged.rbegin(), merged.rend(), [&](const Key& row) { return row.path == key.path; });
      const bool is_first = other == merged.rend();
      place = merged.insert(is_first ? place : other.base(), key);
      place->for_types = {type};
      if (!is_first) place->aliases.clear();  // the first row of a path has them
      ++place;
    }
  }
  for (Key& key : merged)
    if (key.for_types.size() == types.size()) key.for_types.clear();
  return merged;
}

void KeyTable::add(Key key) {
  std::erase(key.aliases, key.path);  // a key of `trainer` may have the argument's name
  for (const Key& other : keys_)
    TESSERA_CHECK(other.path != key.path || (!other.for_types.empty() && !key.for_types.empty()),
                  "key declared twice: ", key.path);
  places_[key.parent()].push_back(keys_.size());
  keys_.push_back(std::move(key));
}
void KeyTable::add(const std::vector<Key>& keys) {
  for (const Key& key : keys) add(key);
}

const Key* KeyTable::find(const std::string& path, const std::string& type) const {
  const size_t dot = path.rfind('.');
  for (const Key* key : children(dot == std::string::npos ? "" : path.substr(0, dot), type))
    if (key->name() == path.substr(dot + 1)) return key;
  return nullptr;
}

const Key* KeyTable::find_any(const std::string& path) const {
  const auto found =
      std::find_if(keys_.begin(), keys_.end(), [&](const Key& key) { return key.path == path; });
  return found == keys_.end() ? nullptr : &*found;
}

std::vector<const Key*> KeyTable::children(const std::string& parent) const {
  std::vector<const Key*> found;
  if (const auto places = places_.find(parent); places != places_.end())
    for (const size_t place : places->second) found.push_back(&keys_[place]);
  if (parent.ends_with("[]"))
    for (const Key* key : children(find_any(parent.substr(0, parent.size() - 2))->items_like))
      if (key->per_group) found.push_back(key);
  return found;
}

std::vector<const Key*> KeyTable::children(const std::string& parent, const std::string& type) const {
  std::vector<const Key*> found = children(parent);
  std::erase_if(found, [&](const Key* key) { return !key->is_for(type); });
  return found;
}

std::vector<std::string> KeyTable::paths_named(const std::string& name) const {
  std::vector<std::string> paths;
  for (const Key& key : keys_)
    if (key.name() == name && std::find(paths.begin(), paths.end(), key.path) == paths.end())
      paths.push_back(key.path);
  return paths;
}

}  // namespace tessera::config

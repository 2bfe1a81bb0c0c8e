#include "engine/config/check.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/str.h"
#include "engine/config/arguments.h"
#include "engine/config/document/suggest.h"

namespace tessera::config {
namespace {

using nlohmann::json;

constexpr const char* kPage = "docs/configuration.md";

bool is_plain(const std::string& name) { return name.find_first_of(".[") == std::string::npos; }

/// Whether the value asks for nothing: a refused key, or one without effect, with a harmless value; an open
/// section that is off or empty.
bool is_harmless(const Key& key, const json& value) {
  if (key.has_effect()) return false;
  if (value.is_null() && (key.use == Use::kRefused || key.nullable)) return true;
  const auto off = [&](const json& found) {
    return found == "auto" || std::any_of(key.harmless.begin(), key.harmless.end(),
                                          [&](const std::string& text) { return parse_json(text) == found; });
  };
  if (key.type != Type::kOpenSection) return off(value);
  if (value == json(false)) return true;
  if (!value.is_object()) return false;
  const auto found = key.switch_key.empty() ? value.end() : value.find(key.switch_key);
  return value.empty() || (found != value.end() && off(*found));
}

void rename_key(Document& document, const std::string& from, const std::string& to) {
  json* value = value_at(*document.json, from);
  if (!value) return;
  json moved = std::move(*value);
  const size_t dot = from.rfind('.');
  (dot == std::string::npos ? document.json.get() : value_at(*document.json, from.substr(0, dot)))
      ->erase(from.substr(dot + 1));
  json& place = make_value(document, to, from);
  if (!place.is_null() && place != "auto")
    document.origins.fail(to,
                          str("is also given under its other name \"", from, "\"; expected one of the two"));
  place = std::move(moved);
  document.origins.rename(from, to);
}

std::string missing(const Key& key, const std::string& type = "") {
  return str("is missing", type.empty() ? "" : ", and " + type + " needs it", "; expected ", accepted(key));
}

/// Checks a document in one traversal.
class Checker {
 public:
  Checker(const Document& document, const KeyTable& table, Problems& problems)
      : document_(document), table_(table), problems_(problems) {}

  void run() {
    check_section(*document_.json, {.path = "", .rows = "", .key = nullptr, .type = ""});
    for (const Key& key : table_.keys()) check_required(key);
  }
  const std::vector<std::string>& without_effect() const { return without_effect_; }

 private:
  /// An object whose keys are checked.
  struct Place {
    std::string path;  ///< in the document
    std::string rows;  ///< in the table: `optimizer.param_groups[]` for each of the list's items
    const Key* key;    ///< of the section, or of the list; null at the top
    std::string type;  ///< which decides what keys it has
    bool is_item() const { return key && key->type == Type::kSectionList; }
  };

  void check_section(const json& object, const Place& place) {
    const bool free = place.key && place.key->type == Type::kFreeSection;
    // Sections after other keys, which may decide (optimizer.type) which keys a section has.
    for (const bool sections : {false, true}) {
      for (const auto& [name, value] : object.items()) {
        const Key* key = is_plain(name) ? table_.find(child_path(place.rows, name), place.type) : nullptr;
        if (!key && (free || sections)) continue;
        if (!key && name.starts_with('_')) {  // a comment, as people write them in JSON
          without_effect_.push_back(child_path(place.path, name));
          continue;
        }
        if (key && sections != (key->type == Type::kSection || key->type == Type::kSectionList)) continue;
        problems_.collect([&] {
          if (!key) fail_unknown(place, name, value);
          check_value(*key, child_path(place.path, name), value);
        });
      }
    }
  }

  void check_value(const Key& key, const std::string& path, const json& value) {
    if (is_harmless(key, value)) return;
    const bool is_off = key.type == Type::kOpenSection && !key.switch_key.empty() && value.is_object() &&
                        !value.contains(key.switch_key);  // DeepSpeed's default for these sections
    if (is_off) check_switch(key, path, value);
    if (std::string wrong = mismatch(key, value); !wrong.empty()) {
      const std::string_view instead = value.is_boolean() ? instead_of_argument(key.path) : "";
      if (!instead.empty()) wrong += str("; as an argument of Hugging Face's: ", instead);
      document_.origins.fail(path, wrong);
    }
    if (key.use == Use::kRefused && !is_off) fail_refused(key, path, value);
    if (!key.has_effect()) return without_effect_.push_back(path);
    if (value.is_null() || is_undecided(key)) return;
    if (key.type == Type::kSection || key.type == Type::kFreeSection)
      check_section(value, {path, key.path, &key, type_in(key)});
    for (size_t i = 0; key.type == Type::kSectionList && i < value.size(); ++i) {
      const Place item{child_path(path, i), key.path + "[]", &key, type_in(*table_.find_any(key.items_like))};
      check_section(value[i], item);
      for (const Key* child : table_.children(item.rows, item.type))
        if (child->required && !value[i].contains(child->name()))
          problems_.collect(
              [&] { document_.origins.fail(child_path(item.path, child->name()), missing(*child)); });
    }
  }

  /// Checks the required keys of the sections that are there, or whose type is given.
  void check_required(const Key& key) {
    const Key* parent = table_.find_any(key.parent());
    if (!key.required || !parent || is_undecided(*parent)) return;  // in a list's items: check_value()
    const std::string type = type_in(*parent);
    if (!key.is_for(type) || value_at(*document_.json, key.path)) return;
    if (!type.empty() || value_at(*document_.json, parent->path))
      problems_.collect([&] { document_.origins.fail(key.path, missing(key, type)); });
  }

  /// The type that decides which keys a section has: "AdamW" for optimizer.params.
  std::string type_in(const Key& section) const {
    if (section.type_key.empty()) return "";
    const Key& key = *table_.find_any(section.type_key);
    const json* written = value_at(*document_.json, key.path);
    const json value = written && !written->is_null() ? *written : parse_json(key.default_json);
    return value.is_string() ? canonical_choice(key, value.get<std::string>()) : "";
  }

  /// Whether the section's type is invalid, which is reported for the type's key. Then the section cannot be
  /// checked.
  bool is_undecided(const Key& key) const {
    const std::string type_key =
        key.items_like.empty() ? key.type_key : table_.find_any(key.items_like)->type_key;
    const json* written = type_key.empty() ? nullptr : value_at(*document_.json, type_key);
    return written && !mismatch(*table_.find_any(type_key), *written).empty();
  }

  /// Finds `{"enabeld": true}`, which must not count as a section that is off.
  void check_switch(const Key& key, const std::string& path, const json& value) const {
    for (const auto& [name, inner] : value.items())
      if (const std::string hint = did_you_mean(name, {key.switch_key}); !hint.empty())
        document_.origins.fail(child_path(path, name),
                               str("unknown key", hint, ", found ", describe_value(inner)));
  }

  [[noreturn]] void fail_refused(const Key& key, const std::string& path, const json& value) const {
    const std::string off = !key.switch_key.empty()
                                ? str(", or {\"", key.switch_key, "\": ", key.harmless[0], "}")
                            : !key.harmless.empty() ? ", or " + join(key.harmless, " or ")
                                                    : "";
    document_.origins.fail(path, str("found ", describe_value(value), ", which Tessera does not do: ",
                                     key.doc, "; expected it to be left out", off));
  }

  [[noreturn]] void fail_unknown(const Place& place, const std::string& name, const json& value) const {
    const std::string path = child_path(place.path, name), found = str("found ", describe_value(value));
    const auto fail = [&](const auto&... text) { document_.origins.fail(path, str(text...)); };
    std::vector<std::string> known, used;
    for (const Key* key : table_.children(place.rows, place.type)) {
      known.push_back(key->name());
      if (key->use == Use::kUsed) used.push_back(key->name());
    }
    const std::string expected = "; expected " + expected_names(name, used, kPage);
    if (!is_plain(name) && !place.is_item())
      fail("unknown key (", found, "); nested keys are written as {\"zero_optimization\": {\"stage\": …}}");
    if (place.key && !place.key->type_key.empty()) {
      const std::string& type_key = place.key->type_key;
      if (place.type.empty())
        fail(found, ", but ", type_key, " is not given; expected ", type_key, ": ",
             accepted(*table_.find_any(type_key)));
      if (const Key* other = table_.find_any(path))
        fail(place.type, " has no \"", name, "\" (", found, "), ", join(other->for_types, " and "),
             other->for_types.size() == 1 ? " has" : " have", expected);
    }
    if (place.path.empty())
      if (const std::string_view instead = instead_of_section(name); !instead.empty())
        fail(found, ", a section of `tessera train` that a program does not have: ", instead);
    if (place.path.empty() || place.path == "trainer")
      if (const std::string_view instead = instead_of_argument(name); !instead.empty())
        fail(found, ", an argument of Hugging Face's or Accelerate's: ", instead);
    std::string hint = did_you_mean(name, known);
    const std::vector<std::string> elsewhere = table_.paths_named(name);
    if (hint.empty() && !elsewhere.empty() && !place.is_item())
      hint = str(" (did you mean \"", elsewhere.front(), "\"?)");
    fail("unknown key", hint, ", ", found, expected);
    throw ConfigError(path);  // not reached
  }

  const Document& document_;
  const KeyTable& table_;
  Problems& problems_;
  std::vector<std::string> without_effect_;
};

}  // namespace

std::vector<std::string> without_aliases(std::vector<std::string> overrides, const KeyTable& table) {
  const auto rename = [&](std::string& text) {
    const std::string path = text.substr(0, text.find('='));
    for (const Key& key : table.keys())
      for (const std::string& alias : key.aliases)
        if (path == alias || path.starts_with(alias + "."))
          return static_cast<void>(text.replace(0, alias.size(), key.path));
  };
  for (std::string& text : overrides) rename(text);
  return overrides;
}

void normalise(Document& document, const KeyTable& table, Problems& problems) {
  for (const Key& key : table.keys())
    for (const std::string& alias : key.aliases)
      problems.collect([&] { rename_key(document, alias, key.path); });
  for (const Key& key : table.keys()) {
    if (key.type != Type::kChoice || key.use != Use::kUsed) continue;
    json* value = value_at(*document.json, key.path);
    if (!value || !value->is_string()) continue;
    if (std::string choice = canonical_choice(key, value->get<std::string>()); !choice.empty())
      *value = choice;
  }
}

void check(const Document& document, const KeyTable& table, Problems& problems, ConfigReport* report) {
  Checker checker(document, table, problems);
  checker.run();
  constexpr size_t kMostNamed = 20;
  std::vector<std::string> keys = checker.without_effect();
  if (keys.size() > kMostNamed) {
    const std::string more = str("… and ", keys.size() - kMostNamed, " more");
    keys.resize(kMostNamed);
    keys.push_back(more);
  }
  if (!keys.empty() && report)
    report->warnings.push_back(str(document.origins.source(), ": ",
                                   keys.size() == 1 ? "this DeepSpeed key has" : "these DeepSpeed keys have",
                                   " no effect in Tessera: ", join(keys, ", ")));
}

void read_field(const Field& field, const json& value, const std::string& path, ConfigReport* report) {
  const std::string meaning = assign_or_auto(field, value);
  if (report && !meaning.empty()) report->resolved.push_back(str(path, ": \"auto\" is ", meaning));
}

void read_fields(const std::vector<Field>& fields, const Document& document, ConfigReport* report) {
  for (const Field& field : fields)
    if (const json* value = value_at(*document.json, field.key.path))
      read_field(field, *value, field.key.path, report);
}

void write_fields(const std::vector<Field>& fields, nlohmann::ordered_json& out) {
  for (const Field& field : fields) {
    std::string pointer = "/" + field.key.path;
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    out[nlohmann::ordered_json::json_pointer(pointer)] = value_of(field);
  }
}

void check_field(const Field& field, const std::string& path, Origins& origins, Problems& problems,
                 const std::string& type) {
  origins.set_line(path, 1);
  problems.collect([&] {
    const json value = value_of(field);
    if (value.is_null() && field.key.required) origins.fail(path, missing(field.key, type));
    if (const std::string wrong = mismatch(field.key, value); !wrong.empty()) origins.fail(path, wrong);
    assign(field, value);
  });
}

std::string unknown_key(const std::string& name, const json& value, const std::vector<std::string>& known) {
  return str("unknown key", did_you_mean(name, known), ", found ", describe_value(value), "; expected ",
             expected_names(name, known, kPage));
}

}  // namespace tessera::config

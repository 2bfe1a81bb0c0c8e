#include "engine/config/check.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/str.h"
#include "engine/config/arguments.h"
#include "engine/config/suggest.h"

namespace tessera::config {
namespace {

using nlohmann::json;

constexpr const char* kPage = "docs/configuration.md";

void rename_key(Document& document, const std::string& from, const std::string& to) {
  json* value = value_at(*document.json, from);
  if (!value) return;
  json moved = std::move(*value);
  const size_t dot = from.rfind('.');
  (dot == std::string::npos ? document.json.get() : value_at(*document.json, from.substr(0, dot)))
      ->erase(from.substr(dot + 1));
  json& place = make_place(document, to, from);
  if (!place.is_null() && place != "auto")
    document.fail(to, str("is also given under its other name \"", from, "\"; expected one of the two"));
  place = std::move(moved);
  document.origins.rename(from, to);
}

/// One walk over a document.
class Checker {
 public:
  Checker(const Document& document, const KeyTable& table, Problems& problems)
      : document_(document), table_(table), problems_(problems) {}

  void run() {
    check_section(*document_.json, "", "", nullptr);
    check_required();
  }
  const std::vector<std::string>& without_effect() const { return without_effect_; }

 private:
  /// `free`: the section may hold keys the table does not have.
  void check_section(const json& object, const std::string& path, const std::string& variant,
                     const Key* section) {
    bool free = section && section->type == Type::kFreeSection;
    // Sections come after words, which may decide (optimizer.type) what a section can hold.
    for (bool sections : {false, true}) {
      for (const auto& [name, value] : object.items()) {
        std::string child = child_path(path, name);
        const Key* key = is_plain(name) ? table_.find(child, variant) : nullptr;
        if (!key && (free || sections)) continue;
        const bool is_section = key && (key->type == Type::kSection || key->type == Type::kSectionList);
        if (is_section != sections) continue;
        problems_.collect([&] {
          if (!key) fail_unknown(child, name, value, path, variant, section);
          check_value(*key, child, value);
        });
      }
    }
  }

  void check_value(const Key& key, const std::string& path, const json& value) {
    if (is_harmless(key, value)) return;
    if (lacks_switch(key, value)) {  // DeepSpeed's default for each of these sections is "off"
      check_switch_name(key, path, value);
      without_effect_.push_back(path);
      return;
    }
    if (std::string wrong = mismatch(key, value); !wrong.empty()) document_.fail(path, wrong);
    if (key.use == Use::kRefused) fail_refused(key, path, value);
    if (key.use == Use::kNoEffect) {
      without_effect_.push_back(path);
      return;
    }
    if (value.is_null()) return;
    if (is_undecided(key)) return;
    if (key.type == Type::kSection || key.type == Type::kFreeSection)
      check_section(value, path, variant_of(key), &key);
    if (key.type == Type::kSectionList) check_items(key, path, value);
  }

  void check_items(const Key& key, const std::string& path, const json& list) {
    const Key* like = table_.find_any(key.items_like);
    std::string variant = like ? variant_of(*like) : "";
    for (size_t i = 0; i < list.size(); ++i) {
      std::string item_path = child_path(path, i);
      for (const auto& [name, value] : list[i].items()) {
        std::string child = child_path(item_path, name);
        const Key* found = is_plain(name) ? item_key(key, name, variant) : nullptr;
        problems_.collect([&] {
          if (!found) fail_unknown_in_item(key, child, name, value, variant);
          check_value(*found, child, value);
        });
      }
      for (const Key* own : table_.children(key.path + "[]"))
        problems_.collect([&] {
          if (own->required && !list[i].contains(own->name()))
            document_.fail(child_path(item_path, own->name()), str("is missing; expected ", accepted(*own)));
        });
    }
  }

  /// A key of a list's item: its own, or one that the list shares with another section.
  const Key* item_key(const Key& list, const std::string& name, const std::string& variant) const {
    if (const Key* own = table_.find(str(list.path, "[].", name))) return own;
    const Key* shared = table_.find(child_path(list.items_like, name), variant);
    return shared && shared->per_group ? shared : nullptr;
  }

  /// Required keys of the sections that are there.
  void check_required() {
    for (const Key& key : table_.keys()) {
      if (!key.required || key.path.find("[]") != std::string::npos) continue;
      json* section = value_at(*document_.json, key.parent());
      if (key.parent().empty()) section = document_.json.get();
      const Key* parent = table_.find_any(key.parent());
      if (parent && is_undecided(*parent)) continue;
      std::string variant = parent ? variant_of(*parent) : "";
      bool belongs = table_.find(key.path, variant) == &key && (section || (parent && !variant.empty()));
      problems_.collect([&] {
        if (belongs && !value_at(*document_.json, key.path))
          document_.fail(key.path, str("is missing", variant.empty() ? "" : ", and " + variant + " needs it",
                                       "; expected ", accepted(key)));
      });
    }
  }

  /// The word that decides which keys a section has: "AdamW" for optimizer.params.
  std::string variant_of(const Key& section) const {
    if (section.variant_of.empty()) return "";
    const Key* discriminator = table_.find_any(section.variant_of);
    const json* written = value_at(*document_.json, section.variant_of);
    json value = written && !written->is_null() ? *written : json::parse(discriminator->default_json);
    return value.is_string() ? canonical_word(*discriminator, value.get<std::string>()) : "";
  }

  /// The word that decides what a section can hold is wrong itself, which is told of that
  /// word: all else would follow from it.
  bool is_undecided(const Key& key) const {
    const std::string decides = key.type == Type::kSectionList && !key.items_like.empty()
                                    ? table_.find_any(key.items_like)->variant_of
                                    : key.variant_of;
    const json* written = decides.empty() ? nullptr : value_at(*document_.json, decides);
    return written && !mismatch(*table_.find_any(decides), *written).empty();
  }

  static bool is_plain(const std::string& name) { return name.find_first_of(".[") == std::string::npos; }

  /// Asks for nothing: a refused key at its off value, an open section that is switched off or empty.
  static bool is_harmless(const Key& key, const json& value) {
    if (key.use == Use::kUsed) return false;
    if (value.is_null() && (key.use == Use::kRefused || key.nullable)) return true;
    auto off = [&](const json& found) {
      return found == "auto" ||
             std::any_of(key.harmless.begin(), key.harmless.end(),
                         [&](const std::string& text) { return json::parse(text) == found; });
    };
    if (key.type != Type::kOpenSection) return value == "auto" || (key.use == Use::kRefused && off(value));
    if (value == json(false)) return true;
    if (!value.is_object()) return false;
    if (value.empty()) return true;
    auto it = key.switch_name.empty() ? value.end() : value.find(key.switch_name);
    return it != value.end() && off(*it);
  }

  static bool lacks_switch(const Key& key, const json& value) {
    return key.type == Type::kOpenSection && !key.switch_name.empty() && value.is_object() &&
           !value.contains(key.switch_name);
  }

  /// `{"enabeld": true}` must not pass for a section that is off.
  void check_switch_name(const Key& key, const std::string& path, const json& value) const {
    for (const auto& [name, inner] : value.items())
      if (!did_you_mean(name, {key.switch_name}).empty())
        document_.fail(child_path(path, name), str("unknown key", did_you_mean(name, {key.switch_name}),
                                                   ", found ", describe_value(inner)));
  }

  [[noreturn]] void fail_refused(const Key& key, const std::string& path, const json& value) const {
    std::string instead;
    if (!key.switch_name.empty())
      instead =
          str("; expected it to be left out, or {\"", key.switch_name, "\": ", key.harmless.front(), "}");
    else if (!key.harmless.empty())
      instead = str("; expected it to be left out, or ", join(key.harmless, " or "));
    else
      instead = "; expected it to be left out";
    document_.fail(path,
                   str("found ", describe_value(value), ", which Tessera does not do: ", key.doc, instead));
  }

  [[noreturn]] void fail_unknown(const std::string& path, const std::string& name, const json& value,
                                 const std::string& parent, const std::string& variant,
                                 const Key* section) const {
    std::string found = str("found ", describe_value(value));
    if (!is_plain(name))
      document_.fail(path, str("unknown key (", found,
                               "); nested keys are written as {\"zero_optimization\": {\"stage\": …}}"));
    if (section && !section->variant_of.empty() && variant.empty())
      document_.fail(path, str(found, ", but ", section->variant_of, " is not given; expected ",
                               section->variant_of, ": ", accepted(*table_.find_any(section->variant_of))));
    if (const Key* elsewhere = section && !variant.empty() ? table_.find_any(path) : nullptr)
      document_.fail(
          path, str(variant, " has no \"", name, "\" (", found, "), ", join(elsewhere->variants, " and "),
                    elsewhere->variants.size() == 1 ? " has" : " have", "; expected ",
                    names_used(name, parent, variant)));
    if (const std::string_view place = parent.empty() || parent == "trainer" ? place_of_argument(name) : "";
        !place.empty())
      document_.fail(path, str(found, ", an argument of Hugging Face's or Accelerate's: ", place));
    std::vector<std::string> known;
    for (const Key* key : table_.children(parent, variant)) known.push_back(key->name());
    std::string hint = did_you_mean(name, known);
    if (auto paths = table_.paths_named(name); hint.empty() && !paths.empty())
      hint = str(" (did you mean \"", paths.front(), "\"?)");
    document_.fail(path,
                   str("unknown key", hint, ", ", found, "; expected ", names_used(name, parent, variant)));
  }

  [[noreturn]] void fail_unknown_in_item(const Key& list, const std::string& path, const std::string& name,
                                         const json& value, const std::string& variant) const {
    std::vector<std::string> known;
    for (const Key* key : table_.children(list.path + "[]")) known.push_back(key->name());
    for (const Key* key : table_.children(list.items_like, variant))
      if (key->per_group) known.push_back(key->name());
    document_.fail(path, str("unknown key", did_you_mean(name, known), ", found ", describe_value(value),
                             "; expected ", expected_names(name, known, kPage)));
  }

  /// The keys of a section that do something, for an error message.
  std::string names_used(const std::string& name, const std::string& parent,
                         const std::string& variant) const {
    std::vector<std::string> names;
    for (const Key* key : table_.children(parent, variant))
      if (key->use == Use::kUsed) names.push_back(key->name());
    return expected_names(name, names, kPage);
  }

  const Document& document_;
  const KeyTable& table_;
  Problems& problems_;
  std::vector<std::string> without_effect_;
};

/// Words in their canonical spelling, so that nobody after this has to know the others.
void spell_words(Document& document, const KeyTable& table) {
  for (const Key& key : table.keys()) {
    if (key.type != Type::kWord || key.use != Use::kUsed) continue;
    json* value = value_at(*document.json, key.path);
    if (!value || !value->is_string()) continue;
    if (std::string word = canonical_word(key, value->get<std::string>()); !word.empty()) *value = word;
  }
}

}  // namespace

std::vector<std::string> under_own_names(std::vector<std::string> overrides, const KeyTable& table) {
  const auto rename = [&](std::string& text) {
    const std::string path = text.substr(0, text.find('='));
    for (const Key& key : table.keys())
      for (const std::string& other : key.other_names)
        if (path == other || path.starts_with(other + "."))
          return static_cast<void>(text.replace(0, other.size(), key.path));
  };
  for (std::string& text : overrides) rename(text);
  return overrides;
}

void normalise(Document& document, const KeyTable& table, Problems& problems) {
  for (const Key& key : table.keys())
    for (const std::string& other : key.other_names)
      problems.collect([&] { rename_key(document, other, key.path); });
  spell_words(document, table);
}

void check(const Document& document, const KeyTable& table, Problems& problems, Report* report) {
  Checker checker(document, table, problems);
  checker.run();
  const auto& keys = checker.without_effect();
  if (!keys.empty() && report)
    report->warnings.push_back(str(document.origins.source(), ": ",
                                   keys.size() == 1 ? "this DeepSpeed key has" : "these DeepSpeed keys have",
                                   " no effect in Tessera: ", join(keys, ", ")));
}

}  // namespace tessera::config

// Key, Field and KeyTable: each configuration key is declared once. Reading, writing and checking a
// configuration, the JSON Schema (configs/schema.json) and the tables of docs/configuration.md all use the
// declaration.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "core/dtype.h"

namespace tessera::config {

enum class Type : uint8_t {
  kBool,
  kInteger,  ///< 4 or 4.0 or 4e0: DeepSpeed files write 5e8
  kNumber,
  kChoice,      ///< one of `choices`
  kChoiceList,  ///< some of `choices`, each at most once, in an order that counts; or one of them
  kText,
  kPair,            ///< a list of two numbers, as betas
  kNumberList,      ///< a number, or a list with one for every param group
  kTextList,        ///< a string or a list of strings
  kNumbersOrTexts,  ///< a number, a string, or a list of them
  kSection,         ///< an object whose keys are in the table
  kSectionList,     ///< a list of such objects
  kOpenSection,     ///< an object whose keys are not checked (it has no effect, or is refused when on)
  kFreeSection,     ///< an object with further keys, which its own reader checks (config::Section)
};

enum class Use : uint8_t {
  kUsed,
  kOldForm,   ///< has been replaced by another key when keys are checked
  kNoEffect,  ///< accepted with a warning
  kRefused,   ///< an error, unless the value is one of `harmless`
};

/// Says which numbers a key accepts.
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;  ///< min itself is excluded
  bool below_max = false;  ///< max itself is excluded
  bool contains(double value) const {
    return (above_min ? value > min : value >= min) && (below_max ? value < max : value <= max);
  }
  bool operator==(const Range&) const = default;
};

/// One key.
struct Key {
  std::string path = {};  ///< dotted; elements of a list as `optimizer.param_groups[].match`
  Type type = Type::kBool;
  std::string doc = {};  ///< one line; for kNoEffect and kRefused the reason
  Range range = {};
  std::vector<std::string> choices = {};  ///< of kChoice and kChoiceList, as in the resolved config
  std::map<std::string, std::string> choice_aliases = {};   ///< other spellings (lower case) -> choice
  std::map<std::string, std::string> refused_choices = {};  ///< known elsewhere (lower case) -> reason
  std::string default_json = "null";                        ///< JSON text; "null": not set
  std::string auto_json = {};  ///< the meaning of "auto", as JSON; empty: "auto" is not accepted
  std::string auto_doc = {};   ///< the same in words, where it is not a constant
  bool nullable = false;
  bool required = false;
  bool per_group = false;                   ///< may stand in a param group too
  std::vector<std::string> aliases = {};    ///< other full paths of this key
  std::vector<std::string> for_types = {};  ///< the types (AdamW, WarmupLR …) that have the key; empty: all
  Use use = Use::kUsed;
  std::vector<std::string> harmless = {};  ///< kNoEffect, kRefused: values (JSON) that ask for nothing
  std::string switch_key = {};             ///< kOpenSection: the key inside that turns it on
  std::string type_key = {};               ///< kSection: the key whose value decides which keys it has
  std::string items_like = {};  ///< kSectionList: items may also have the per-group keys of this section

  std::string name() const;    ///< the last part of the path
  std::string parent() const;  ///< the path without it
  bool takes_auto() const { return !auto_json.empty(); }
  bool has_effect() const { return use == Use::kUsed || use == Use::kOldForm; }
  bool is_for(const std::string& type) const;
  bool operator==(const Key&) const = default;
};

/// A property of a key besides type, path and meaning.
using Attribute = std::function<void(Key&)>;
Attribute at_least(double min);
Attribute above(double min);
Attribute between(double min, double max);
Attribute from_to_below(double min, double max);
Attribute choices(std::vector<std::string> choices, std::map<std::string, std::string> aliases = {});
Attribute choice_list(std::vector<std::string> choices, std::map<std::string, std::string> aliases = {});
Attribute auto_is(std::string json, std::string in_words = "");
Attribute argument(const std::string& name);  ///< Hugging Face's or Accelerate's, at the top or in `trainer`
Attribute alias(std::string path);
Attribute of_type(Type type);
inline const Attribute kAutoIsDefault = [](Key& key) { key.auto_json = "default"; };  ///< see keys_of()
inline const Attribute kNullable = [](Key& key) { key.nullable = true; };
inline const Attribute kRequired = [](Key& key) { key.required = true; };
inline const Attribute kPerGroup = [](Key& key) { key.per_group = true; };

/// {"a", "b"} for "a b".
std::vector<std::string> split_names(const std::string& names);

/// A key that fills no field, or one with a rule of its own.
template <class... Attributes>
Key make_key(Type type, std::string path, std::string doc, const Attributes&... attributes) {
  Key key{.path = std::move(path), .type = type, .doc = std::move(doc)};
  (attributes(key), ...);
  return key;
}

/// The member of a struct that a key fills. Its type says what the key accepts: a string with choices one of
/// them, a list of strings with choices some of them in order (empty: not given), two numbers a pair, a list
/// of numbers one for every param group or one for all.
using Target = std::variant<bool*, int*, int64_t*, double*, std::string*, DType*, std::optional<DType>*,
                            std::optional<int64_t>*, std::optional<double>*, std::optional<std::string>*,
                            std::array<double*, 2>, std::vector<double>*, std::vector<std::string>*>;

/// A key together with the member that it fills: {"stage", &zero.stage, "What is sharded …", between(0, 3)}.
/// Valid as long as the struct is.
struct Field {
  template <class... Attributes>
  Field(std::string path, Target target_, std::string doc, const Attributes&... attributes)
      : key(make_key(type_of(target_), std::move(path), std::move(doc), attributes...)), target(target_) {}
  static Type type_of(const Target& target);

  Key key;
  Target target;
};

/// Fields with their paths inside a section.
std::vector<Field> in_section(const std::string& section, std::vector<Field> fields);

/// Assigns a value that passed mismatch() to the field's member.
void assign(const Field& field, const nlohmann::json& value);
/// The same for a value that may be "auto", in a struct that has its defaults: returns the meaning of
/// "auto" in words, and "" for other values.
std::string assign_or_auto(const Field& field, const nlohmann::json& value);
/// The member's value; null for what is unset (or "auto", where that means unset).
nlohmann::json value_of(const Field& field);

/// The keys of fields of a default-constructed struct, with these defaults.
std::vector<Key> keys_of(std::vector<Field> defaults);
/// The keys of a section whose keys depend on a type. `types`: each type with its keys. Equal keys of
/// several types are merged into one, with these types in for_types.
std::vector<Key> merged_keys(const std::vector<std::pair<std::string, std::vector<Key>>>& types);

/// Finds keys by path. A path has several rows where its default depends on the type (of optimizer, of
/// schedule).
class KeyTable {
 public:
  void add(Key key);
  void add(const std::vector<Key>& keys);

  const std::vector<Key>& keys() const { return keys_; }
  /// The row for this path and type, or null.
  const Key* find(const std::string& path, const std::string& type = "") const;
  /// Any row with this path, whatever its type, or null.
  const Key* find_any(const std::string& path) const;
  /// Rows directly inside `parent`, in order of declaration. Inside `LIST[]` also the per-group keys that its
  /// items share with another section.
  std::vector<const Key*> children(const std::string& parent) const;
  /// Returns those of these rows that this type has.
  std::vector<const Key*> children(const std::string& parent, const std::string& type) const;
  /// Full paths whose last part is `name`.
  std::vector<std::string> paths_named(const std::string& name) const;

 private:
  std::vector<Key> keys_;
  // Has the rows' places in keys_, by the section that a row is directly inside.
  std::map<std::string, std::vector<size_t>, std::less<>> places_;
};

/// "an integer from 0 to 3", `one of "auto", "cpu", "cuda"`, …: what a key accepts, for errors and
/// docs.
std::string accepted(const Key& key);

/// The spelling of a choice in the resolved config, for any accepted spelling; "" when it is not a
/// choice of the key.
std::string canonical_choice(const Key& key, const std::string& written);

/// Nothing when the value has the key's type and range ("auto" and null included where allowed);
/// else what is wrong: `found 7 (a number); expected an integer from 0 to 3`.
std::string mismatch(const Key& key, const nlohmann::json& value);

}  // namespace tessera::config

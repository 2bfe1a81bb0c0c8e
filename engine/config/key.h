// Key and KeyTable: the one declaration of every configuration key. Checking a file, the JSON Schema
// (configs/schema.json) and the tables of docs/configuration.md all come from it.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace tessera::config {

enum class Type : uint8_t {
  kBool,
  kInteger,  ///< 4 or 4.0 or 4e0: DeepSpeed files write 5e8
  kNumber,
  kWord,  ///< one of `words`
  kText,
  kPair,         ///< a list of two numbers, as betas
  kNumberList,   ///< a number, or a list with one for every param group
  kTextList,     ///< a string or a list of strings
  kSection,      ///< an object whose keys are in the table
  kSectionList,  ///< a list of such objects
  kOpenSection,  ///< an object whose inside is not looked at (it has no effect, or is refused when on)
  kFreeSection,  ///< an object with further keys that its own reader checks (config::Section)
};

enum class Use : uint8_t {
  kUsed,
  kNoEffect,  ///< accepted with a warning
  kRefused,   ///< an error, unless it asks for nothing (`harmless`)
};

/// One key. Built by the functions below, e.g.
///   integer("zero_optimization.stage").range(0, 3).says("What is sharded …")
struct Key {
  std::string path;  ///< dotted; elements of a list as `optimizer.param_groups[].match`
  Type type = Type::kBool;
  Use use = Use::kUsed;
  std::string doc;                    ///< one line; for kNoEffect and kRefused the reason
  std::string default_json = "null";  ///< JSON text; "null": not set
  std::string auto_json;              ///< what "auto" stands for, as JSON; empty: "auto" is not accepted
  std::string auto_doc;               ///< the same in words, where it is no constant
  bool nullable = false;
  bool required = false;
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;                            ///< min itself is excluded
  bool below_max = false;                            ///< max itself is excluded
  std::vector<std::string> words;                    ///< kWord: as they are written in the resolved config
  std::map<std::string, std::string> other_words;    ///< kWord: other spellings (lower case) -> word
  std::map<std::string, std::string> refused_words;  ///< kWord: known elsewhere (lower case) -> reason
  std::vector<std::string> other_names;              ///< full paths that mean this key
  std::vector<std::string> harmless;                 ///< kRefused: values (JSON) that ask for nothing
  std::string switch_name;                           ///< kOpenSection: the key inside that turns it on
  std::string variant_of;                            ///< kSection: its keys depend on the word at this path
  std::vector<std::string> variants;                 ///< the words of that path this row is for; empty: all
  std::string items_like;  ///< kSectionList: items may also hold the per-group keys of this section
  bool per_group = false;  ///< may stand in a param group too

  Key& range(double low, double high = std::numeric_limits<double>::infinity());
  Key& above(double low);
  Key& below();  ///< excludes the maximum of range()
  Key& says(std::string text);
  Key& or_null();
  Key& must();
  Key& fallback(std::string json_text);
  Key& takes_auto(std::string json_text, std::string in_words = "");
  Key& also(std::string other_path);
  /// An argument of Hugging Face's or Accelerate's that means this key: `name` at the top, and in `trainer`.
  Key& also_argument(const std::string& name);
  Key& also_word(std::string other, std::string word);
  Key& refuses_word(std::string word, std::string reason);
  Key& no_effect(std::string why);
  Key& refused(std::string why, std::vector<std::string> unless);
  Key& switched_by(std::string name, std::vector<std::string> off_values);
  Key& of(std::vector<std::string> for_variants);
  Key& in_groups();

  std::string name() const;    ///< the last part of the path
  std::string parent() const;  ///< the path without it
  bool takes_word_auto() const { return !auto_json.empty(); }
};

Key boolean(std::string path);
Key integer(std::string path);
Key number(std::string path);
Key word(std::string path, std::vector<std::string> words);
Key text(std::string path);
Key pair(std::string path);
Key number_list(std::string path);
Key text_list(std::string path);
Key section(std::string path);
Key section_list(std::string path);
Key open_section(std::string path);
Key free_section(std::string path);

/// Keys by path. A path has several rows where its default depends on the variant (optimizer type).
class KeyTable {
 public:
  void add(Key key);
  void add(std::vector<Key> keys);
  void add(const KeyTable& other);

  const std::vector<Key>& keys() const { return keys_; }
  /// The row for this path and variant, or null.
  const Key* find(const std::string& path, const std::string& variant = "") const;
  /// Any row with this path, whatever its variant, or null.
  const Key* find_any(const std::string& path) const;
  /// Rows directly inside `parent`, in order of declaration, for the variant.
  std::vector<const Key*> children(const std::string& parent, const std::string& variant = "") const;
  /// Full paths whose last part is `name`.
  std::vector<std::string> paths_named(const std::string& name) const;

 private:
  std::vector<Key> keys_;
};

/// Local. "an integer from 0 to 3", `one of "auto", "cpu", "cuda"`, …: what a
/// key accepts, for errors and docs.
std::string accepted(const Key& key);

/// Local. The word as it stands in the resolved config, for any spelling of it;
/// "" when it is none of the key's.
std::string canonical_word(const Key& key, const std::string& written);

/// Local. Nothing when the value has the key's type and range ("auto" and null included where allowed);
/// else what is wrong: `found 7 (a number); expected an integer from 0 to 3`.
std::string mismatch(const Key& key, const nlohmann::json& value);

}  // namespace tessera::config

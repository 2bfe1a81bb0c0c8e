// Document: a configuration as it was written, with the line of every key, so that an error can say
// `ds_config.json:12: zero_optimization.stage: …`. Reading is strict: duplicate keys, trailing text, invalid
// UTF-8 and very deep nesting are errors. The text may be Hjson, as DeepSpeed's may be.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "core/error.h"
#include "core/json/json_reader.h"

namespace tessera::config {

/// Remembers where keys come from (file line or command line). A value: copies are independent. Paths are
/// written as in `a.b[2].c`.
class Origins {
 public:
  explicit Origins(std::string source = "config") : source_(std::move(source)) {}

  const std::string& source() const { return source_; }
  void set_line(const std::string& path, int line) { origins_[path] = {line, next_++}; }
  /// The key, with all that is below it, was given on the command line (`--set`) rather than in the file.
  void set_override(const std::string& path);
  /// Moves the entries of a key and of everything below it to another name.
  void rename(const std::string& from, const std::string& to);
  /// What gives overrides, for messages.
  void name_overrides(std::string source) { override_source_ = std::move(source); }
  /// "ds_config.json:12", "--set", or the source alone when the path was never written.
  std::string where(const std::string& path) const;
  bool is_override(const std::string& path) const { return origin_of(path).line == kOverride; }
  /// Grows from the file's first key to its last, then over the command line's; 0 for what was never written.
  int order(const std::string& path) const { return origin_of(path).order; }
  /// "<where>: <path>: <text>" on one line.
  std::string message(const std::string& path, const std::string& text) const;
  /// Throws KeyError with that message.
  [[noreturn]] void fail(const std::string& path, const std::string& text) const;

 private:
  static constexpr int kOverride = 0;
  static constexpr int kNowhere = -1;
  struct Origin {
    int line = kNowhere;
    int order = 0;
  };
  /// Returns the origin of the nearest enclosing key that was written: a missing key has the origin of its
  /// section.
  Origin origin_of(const std::string& path) const;

  std::string source_, override_source_ = "--set";
  std::map<std::string, Origin> origins_;
  int next_ = 1;
};

/// Reports an error about one key. It is a ConfigError, with its Origins::order().
class KeyError : public ConfigError {
 public:
  KeyError(const std::string& what, int order) : ConfigError(what), order_(order) {}
  int order() const { return order_; }

 private:
  int order_;
};

/// Collects errors, so that one run reports all of them. Not thread-safe.
class Problems {
 public:
  /// Calls check() and keeps the ConfigError it throws. Does not call it once is_full().
  template <class Check>
  void collect(const Check& check) {
    if (is_full()) return;
    try {
      check();
    } catch (const KeyError& error) {
      add(error.what(), error.order());
    } catch (const ConfigError& error) {
      add(error.what(), kLast);
    }
  }
  void add(std::string line, int order) { lines_.emplace(order, std::move(line)); }
  /// There are so many errors that looking for more would only take time.
  bool is_full() const { return lines_.size() >= kMostKept; }
  /// Throws ConfigError with a line for each of the first 20 errors, in the order of the file, if there are
  /// any.
  void raise() const;

 private:
  static constexpr size_t kMostKept = 200, kMostShown = 20;
  static constexpr int kLast = 1 << 30;  // about no single key
  std::multimap<int, std::string> lines_;
};

/// A parsed configuration and its origins. Movable; owns the JSON value.
struct Document {
  Document();
  Document(Document&&) noexcept;
  Document& operator=(Document&&) noexcept;
  ~Document();

  std::unique_ptr<nlohmann::json> json;  ///< always an object, never null
  Origins origins;
};

/// An object of JSON or Hjson. `source` names the text in errors. Throws ConfigError: "source:line:column: …"
/// for a text that is neither.
Document parse_document(std::string_view text, const std::string& source);

/// Throws ConfigError when the file is missing, a folder, unreadable, empty, or not valid JSON.
Document read_document(const std::string& file);

/// `zero_optimization.stage=3`: the value is read as JSON, or else as a string; sections that are
/// absent are created; `name[2]` is an existing element of a list. Later ones win. Throws ConfigError.
void apply_overrides(Document& document, const std::vector<std::string>& overrides);

/// The value at a dotted path, or null.
const nlohmann::json* value_at(const nlohmann::json& root, const std::string& path);
nlohmann::json* value_at(nlohmann::json& root, const std::string& path);

/// The value at a dotted path; null, with the sections on the way, when there was none. Throws
/// KeyError, which names `for_key`, when a value on the path is not a section.
nlohmann::json& make_value(Document& document, const std::string& path, const std::string& for_key);

/// A value for an error message: JSON on one line, cut after 60 characters, with its type:
/// `"two" (a string)`.
std::string describe_value(const nlohmann::json& value);

}  // namespace tessera::config

// Document: a configuration as it was written, with the place every key came from, so that an error can
// say `ds_config.json:12: zero_optimization.stage: …`. Reading is strict: duplicate keys, trailing text,
// invalid UTF-8 and nesting bombs are errors. Comments (`//` and `/* */`) are allowed.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "core/error.h"

namespace tessera::config {

/// Where keys came from. A value: copies are independent. Paths are written as in `a.b[2].c`.
class Origins {
 public:
  explicit Origins(std::string source = "config") : source_(std::move(source)) {}

  const std::string& source() const { return source_; }
  void set_line(const std::string& path, int line) { places_[path] = {line, next_++}; }
  /// The key was given on the command line (`--set`) rather than in the file.
  void set_override(const std::string& path) { places_[path] = {kOverride, next_++}; }
  /// The key follows from another one and counts as written where that one is.
  void copy(const std::string& from, const std::string& to) { places_[to] = place_of(from); }
  /// Moves the entries of a key and of everything below it to another name.
  void rename(const std::string& from, const std::string& to);
  /// "ds_config.json:12", "--set", or the source alone when the path was never written.
  std::string where(const std::string& path) const;
  bool is_override(const std::string& path) const { return place_of(path).line == kOverride; }
  /// Grows from the file's first key to its last, and on over the command
  /// line's; 0 for what was never written.
  int order(const std::string& path) const { return place_of(path).order; }

 private:
  static constexpr int kOverride = 0;
  static constexpr int kNowhere = -1;
  struct Place {
    int line = kNowhere;
    int order = 0;
  };
  /// Of the nearest enclosing key that was written: a key that is missing belongs to its section.
  Place place_of(const std::string& path) const;

  std::string source_;
  std::map<std::string, Place> places_;
  int next_ = 1;
};

/// A ConfigError about one key, with its Origins::order().
class KeyError : public ConfigError {
 public:
  KeyError(const std::string& what, int order) : ConfigError(what), order_(order) {}
  int order() const { return order_; }

 private:
  int order_;
};

/// Mistakes that are to be told together. Not thread-safe.
class Problems {
 public:
  /// Calls check() and takes note of the ConfigError it throws.
  template <class Check>
  void collect(const Check& check) {
    try {
      check();
    } catch (const KeyError& error) {
      add(error.what(), error.order());
    } catch (const ConfigError& error) {
      add(error.what(), kLast);
    }
  }
  void add(std::string line, int order) { lines_.emplace(order, std::move(line)); }
  bool empty() const { return lines_.empty(); }
  /// Throws ConfigError with a line for each mistake, in the order of the file, if there are any.
  void raise() const;

 private:
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

  /// Throws KeyError "<where>: <path>: <text>" on one line.
  [[noreturn]] void fail(const std::string& path, const std::string& text) const;
};

/// Local. `source` names the text in errors. Throws ConfigError: syntax errors as "source:line:column: …".
Document parse_document(std::string_view text, const std::string& source);

/// Local. Throws ConfigError when the file is missing, a folder, unreadable, empty, or not valid JSON.
Document read_document(const std::string& file);

/// Local. Any JSON value, as strictly as a document. Throws ConfigError.
nlohmann::json parse_value(std::string_view text, const std::string& source);

/// Local. `zero_optimization.stage=3`: the value is read as JSON, or else as a string; sections that are
/// absent are created; `name[2]` is an existing element of a list. Later ones win. Throws ConfigError.
void apply_overrides(Document& document, const std::vector<std::string>& overrides);

/// Local. The value at a dotted path, or null.
const nlohmann::json* value_at(const nlohmann::json& root, const std::string& path);
nlohmann::json* value_at(nlohmann::json& root, const std::string& path);

/// Local. Where the value at a dotted path belongs; null when nothing stands there. Sections on the way are
/// made. Throws KeyError, which names `for_key`, where something that is no section stands in the way.
nlohmann::json& make_place(Document& document, const std::string& path, const std::string& for_key);

/// Local. A value for an error message: JSON on one line, cut after 60 characters, with its type:
/// `"two" (a string)`.
std::string describe_value(const nlohmann::json& value);

/// Local. A path with control characters escaped, so that an error stays one line.
std::string printable(std::string_view path);

/// Local. `parent.name`, or `name` at the top.
std::string child_path(const std::string& parent, const std::string& name);
std::string child_path(const std::string& parent, size_t index);

}  // namespace tessera::config

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

namespace tessera::config {

/// Where keys came from. A value: copies are independent. Paths are written as in `a.b[2].c`.
class Origins {
 public:
  explicit Origins(std::string source = "config") : source_(std::move(source)) {}

  const std::string& source() const { return source_; }
  void set_line(const std::string& path, int line) { lines_[path] = line; }
  /// The key was given on the command line (`--set`) rather than in the file.
  void set_override(const std::string& path) { lines_[path] = kOverride; }
  /// Moves the entries of a key and of everything below it to another name.
  void rename(const std::string& from, const std::string& to);
  /// "ds_config.json:12", "--set", or the source alone when the path was never written.
  std::string where(const std::string& path) const;

 private:
  static constexpr int kOverride = 0;
  std::string source_;
  std::map<std::string, int> lines_;
};

/// A parsed configuration and its origins. Movable; owns the JSON value.
struct Document {
  Document();
  Document(Document&&) noexcept;
  Document& operator=(Document&&) noexcept;
  ~Document();

  std::unique_ptr<nlohmann::json> json;  ///< always an object, never null
  Origins origins;

  /// Throws ConfigError "<where>: <path>: <text>" on one line.
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

/// Local. A value for an error message: JSON on one line, cut after 60 characters, with its type:
/// `"two" (a string)`.
std::string describe_value(const nlohmann::json& value);

/// Local. A path with control characters escaped, so that an error stays one line.
std::string printable(std::string_view path);

/// Local. `parent.name`, or `name` at the top.
std::string child_path(const std::string& parent, const std::string& name);
std::string child_path(const std::string& parent, size_t index);

}  // namespace tessera::config

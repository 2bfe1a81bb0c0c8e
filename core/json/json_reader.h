// JsonReader: the one reader of JSON texts. Configurations, manifests, headers of safetensors files, lines of
// logs and answers of servers are all read here, so all are held to the same grammar and the same limits.
//
// The grammar is RFC 8259: no trailing comma, no NaN and Infinity, no text after the value. A text is refused
// where it has invalid UTF-8, a control character, a number that a double or an integer of 64 bits cannot
// hold, or more levels of nesting than allowed. A byte order mark at its start is skipped. JsonOptions::hjson
// is for what people write: the grammar is then that of https://hjson.github.io/syntax.html.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace tessera {

/// Nesting deeper than this is an error: nothing that we read needs it, and who reads a tree is recursive.
inline constexpr int kMaxJsonDepth = 64;

/// A text is not what the grammar, or a limit, allows. what() says what was found and what was expected, but
/// neither the file nor the place: who reads the file adds those in its own way.
class JsonError : public Error {
 public:
  enum class Kind { kSyntax, kEmpty, kTooDeep, kKeyTwice };
  JsonError(Kind kind, size_t offset, const std::string& what, std::string path = "")
      : Error(what), kind_(kind), offset_(offset), path_(std::move(path)) {}
  Kind kind() const { return kind_; }
  /// The byte of the text, from 0.
  size_t offset() const { return offset_; }
  /// Returns the path of the key that is given twice, as in `a.b[2].c`.
  const std::string& path() const { return path_; }

 private:
  Kind kind_;
  size_t offset_;
  std::string path_;
};

struct JsonOptions {
  const char* name = "JSON text";  ///< what the text is, for messages: "configuration"
  bool hjson = false;              ///< whether Hjson, of which each JSON text is one, is accepted
  bool quoted = false;         ///< of Hjson, what is JSON but for comments and commas at the ends of lines
  bool nul_in_strings = true;  ///< whether a string may have a \u0000
  int64_t max_values = std::numeric_limits<int64_t>::max();
};

/// kUnsigned and kNegative are integers that 64 bits hold; kFraction is every other number.
enum class JsonKind { kObject, kArray, kString, kUnsigned, kNegative, kFraction, kBoolean, kNull };

/// Reads a text from front to back, a value at a time, in memory of one token. Who wants a tree calls
/// parse_json(). Does not look for duplicate keys: who keeps the keys does. Not thread-safe. Requires: `text`
/// outlives the reader. Members throw JsonError.
///
///   JsonReader in(text);
///   in.enter_object();
///   for (std::string key; in.next_key(key);)
///     if (in.next() == JsonKind::kString) names[key] = in.string(); else in.skip();
///   in.finish();
class JsonReader {
 public:
  explicit JsonReader(std::string_view text, const JsonOptions& options = {});

  /// The kind of the value that comes next.
  JsonKind next();
  /// The next value as a message shows it: `7`, `'F32'`, `null`, `an object`.
  std::string found(const char* array = "a list");

  // Each reads the next value, of which next() has said that it is of this kind.
  std::string string();
  bool boolean();
  uint64_t unsigned_integer();
  int64_t negative_integer();
  double fraction();
  void null();

  void enter_object();
  void enter_array();
  /// Reads the key of the next member. False: there is none, and the object has been left.
  bool next_key(std::string& key);
  /// False: there is no further element, and the array has been left.
  bool next_element();

  /// Reads the next value, whatever it is, and drops it.
  void skip();
  /// Throws unless only blanks follow.
  void finish();

  /// Returns the offset of the last key's closing quote.
  size_t key_offset() const { return key_end_ - 1; }
  /// Where the first text without quotes begins that has a '"' inside; npos without one.
  size_t half_quoted() const { return half_quoted_; }
  /// The line of the last key, from 1.
  int key_line();

 private:
  [[noreturn]] void fail(size_t offset, const std::string& what,
                         JsonError::Kind kind = JsonError::Kind::kSyntax) const;
  [[noreturn]] void fail_expecting(const std::string& expected) const;
  [[noreturn]] void fail_escape(size_t offset) const;
  void check_bytes() const;
  char peek();
  void scan();
  void scan_string();
  void scan_lines();
  void scan_unquoted();
  void scan_word(std::string_view word);
  void scan_number(std::string_view word);
  void take(JsonKind kind);
  void enter(JsonKind kind);
  bool next_item();
  const char* after_value() const;
  std::string_view word_at(size_t start) const;
  std::string token_at(size_t start) const;

  std::string_view text_;
  JsonOptions options_;
  size_t at_ = 0;
  std::string open_;       // the brackets that will close what is open; '\0': the end of the text will
  bool is_first_ = false;  // nothing of the innermost has been read
  int64_t num_values_ = 0;

  bool scanned_ = false;  // the next value is what follows, and ends at end_
  JsonKind kind_ = JsonKind::kNull;
  size_t end_ = 0;
  std::string string_;
  uint64_t unsigned_ = 0;
  int64_t negative_ = 0;
  double fraction_ = 0;
  bool boolean_ = false;

  size_t key_end_ = 1;
  size_t unquoted_ = std::string_view::npos;  // where the first text without quotes begins that has a bracket
  size_t half_quoted_ = std::string_view::npos;
  size_t counted_ = 0;  // lines before this byte are counted in line_
  int line_ = 1;
};

/// Called for each key with its path, as in `a.b[2].c`, and its line.
using OnJsonKey = std::function<void(const std::string& path, int line)>;

/// The whole text as a tree, in which no object has a key twice. Throws JsonError. Where a text is JSON but
/// for a comma or a quote that is missing, the error is JSON's, also if Hjson takes what follows for a text
/// without quotes.
nlohmann::json parse_json(std::string_view text, const JsonOptions& options = {},
                          const OnJsonKey& on_key = {});
/// The same with the keys in the order of the text, for short objects: each looks through the keys before it.
nlohmann::ordered_json parse_ordered_json(std::string_view text, const JsonOptions& options = {});

/// The same for texts that may be cut off or something else, such as a log's last line. When it is no JSON
/// text, the result is "discarded": neither an object nor anything else.
nlohmann::json parse_json_or_discard(std::string_view text);

/// `parent.name`, or `name` at the top.
std::string child_path(const std::string& parent, std::string_view name);
/// `parent[index]`.
std::string child_path(const std::string& parent, size_t index);

}  // namespace tessera

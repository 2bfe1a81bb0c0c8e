#include "core/json/json_reader.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera {
namespace {

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
/// Where the line of an offset ends.
size_t line_end(std::string_view text, size_t at) {
  return std::min(text.find_first_of("\r\n", at), text.size());
}
std::string_view trimmed(std::string_view text) {
  return text.substr(0, text.find_last_not_of(" \t\r\n") + 1);
}
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_hex_digit(char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }
bool is_word(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '.' ||
         c == '+' || c == '-';
}

/// The length of the JSON number at the start of `word`; 0 when there is none.
size_t number_length(std::string_view word) {
  size_t end = word[0] == '-' ? 1 : 0;
  const auto digits = [&] {
    const size_t begin = end;
    while (end < word.size() && is_digit(word[end])) ++end;
    return end > begin;
  };
  if (end < word.size() && word[end] == '0')
    ++end;  // no digit follows a leading zero
  else if (!digits())
    return 0;
  if (end < word.size() && word[end] == '.') {
    ++end;
    if (!digits()) return 0;
  }
  if (end < word.size() && (word[end] == 'e' || word[end] == 'E')) {
    ++end;
    if (end < word.size() && (word[end] == '+' || word[end] == '-')) ++end;
    if (!digits()) return 0;
  }
  return end;
}

}  // namespace

JsonReader::JsonReader(std::string_view text, const JsonOptions& options) : text_(text), options_(options) {
  check_bytes();
  if (text_.starts_with("\xef\xbb\xbf")) at_ = 3;  // byte order mark
}

void JsonReader::fail(size_t offset, const std::string& what, JsonError::Kind kind) const {
  if (kind == JsonError::Kind::kSyntax && unquoted_ < offset) {  // it has probably taken what is missed here
    const size_t length = std::min<size_t>(line_end(text_, unquoted_) - unquoted_, 40);
    throw JsonError(kind, unquoted_,
                    str("found '", without_control_characters(text_.substr(unquoted_, length), true),
                        "', which without quotes is a text up to the end of its line; expected true, false, "
                        "null or a number and then ',' or a new line, or the text in double quotes"));
  }
  throw JsonError(kind, offset, what);
}

/// About a token that is not what the grammar has at this place.
void JsonReader::fail_expecting(const std::string& expected) const {
  if (at_ >= text_.size())
    fail(text_.size(), str("the text ends too early; ", open_.empty() || open_.back() == '\0'
                                                            ? "expected " + expected
                                                            : str("a '", open_.back(), "' is missing")));
  if (text_[at_] == '\'' && !options_.hjson) fail(at_, "found '; JSON strings stand in double quotes");
  fail(at_, str("found ", token_at(at_), "; expected ", expected));
}

void JsonReader::fail_escape(size_t offset) const {
  fail(offset, "invalid escape in a string; JSON knows \\\" \\\\ \\/ \\b \\f \\n \\r \\t \\uXXXX");
}

void JsonReader::check_bytes() const {
  for (size_t i = 0; i < text_.size();) {
    const auto c = static_cast<unsigned char>(text_[i]);
    if (c >= 0x20 && c < 0x80) {
      ++i;
      continue;
    }
    char hex[8];
    std::snprintf(hex, sizeof hex, "0x%02x", c);
    const size_t length = utf8_length(text_.substr(i));
    if (length == 0) fail(i, str("byte ", hex, " is not valid UTF-8; expected a JSON text"));
    if (c < 0x20 && !is_blank(text_[i])) fail(i, str("control character ", hex, "; expected a JSON text"));
    i += length;
  }
}

/// The next character of the grammar, past blanks and comments; '\0' at the end.
char JsonReader::peek() {
  while (at_ < text_.size()) {
    if (is_blank(text_[at_])) {
      ++at_;
    } else if (options_.hjson && (text_[at_] == '#' || text_.substr(at_, 2) == "//")) {
      at_ = line_end(text_, at_);
    } else if (options_.hjson && text_.substr(at_, 2) == "/*") {
      const size_t end = text_.find("*/", at_ + 2);
      if (end == text_.npos) fail(text_.size(), "the text ends inside a comment");
      at_ = end + 2;
    } else {
      return text_[at_];
    }
  }
  return '\0';
}

/// What may follow a value.
const char* JsonReader::after_value() const {
  if (open_.empty()) return "the end";
  return open_.back() == '}' ? "',' or '}'" : open_.back() == ']' ? "',' or ']'" : "a key";
}

std::string_view JsonReader::word_at(size_t start) const {
  size_t end = start;
  while (end < text_.size() && is_word(text_[end])) ++end;
  return text_.substr(start, end - start);
}

std::string JsonReader::token_at(size_t start) const {
  std::string_view token = word_at(start);
  if (text_[start] == '"') token = text_.substr(start, text_.find_first_of("\"\n", start + 1) + 1 - start);
  if (token.empty()) token = text_.substr(start, std::max<size_t>(1, utf8_length(text_.substr(start))));
  return str("'", without_control_characters(token.substr(0, 40), true), "'");
}

/// Finds the next value's kind and, unless it is an object or array, its value and its end.
void JsonReader::scan() {
  const char c = peek();
  if (++num_values_ > options_.max_values)
    fail(at_, str("more than ", options_.max_values, " values; expected a ", options_.name));
  const bool has_no_braces =
      options_.hjson && !options_.quoted && num_values_ == 1 && c != '{' && c != '[';  // an object around all
  if (has_no_braces && c == '\0')
    fail(at_, str("the ", options_.name, " is empty; expected an object"), JsonError::Kind::kEmpty);
  if (c == '{' || c == '[' || has_no_braces) {
    if (open_.size() == kMaxJsonDepth)
      fail(at_, str("nested deeper than ", kMaxJsonDepth, " levels"), JsonError::Kind::kTooDeep);
    kind_ = c == '[' ? JsonKind::kArray : JsonKind::kObject;
    end_ = at_ + (has_no_braces ? 0 : 1);
  } else if (c == '"' || (options_.hjson && c == '\'')) {
    text_.substr(at_, 3) == "'''" ? scan_lines() : scan_string();
    kind_ = JsonKind::kString;
  } else if (options_.hjson && !options_.quoted) {
    scan_unquoted();
  } else {
    scan_word(word_at(at_));
  }
  scanned_ = true;
}

/// Sets string_ and end_.
void JsonReader::scan_string() {
  const char quote = text_[at_];
  size_t end = at_ + 1;
  bool has_escape = false;
  for (; end < text_.size() && text_[end] != quote; ++end) {
    if (static_cast<unsigned char>(text_[end]) < 0x20)
      fail(end, str("a string is not closed on its line; a '", quote, "' is missing"));
    if (text_[end] != '\\') continue;
    has_escape = true;
    if (++end >= text_.size()) break;
    if (options_.hjson && text_[end] == '\'') continue;
    if (std::string_view("\"\\/bfnrtu").find(text_[end]) == std::string_view::npos) fail_escape(end);
    for (int digits = text_[end] == 'u' ? 4 : 0; digits > 0; --digits)
      if (++end < text_.size() && !is_hex_digit(text_[end])) fail_escape(end);
  }
  if (end >= text_.size()) fail(text_.size(), "the text ends inside a string");
  end_ = end + 1;
  if (!has_escape) {
    string_ = text_.substr(at_ + 1, end - at_ - 1);
    return;
  }
  std::string in_json = "\"";
  for (size_t i = at_ + 1; i < end; ++i) {
    if (text_[i] == '"') in_json += '\\';  // between '
    if (text_[i] == '\\' && text_[++i] != '\'') in_json += '\\';
    in_json += text_[i];
  }
  nlohmann::json decoded = nlohmann::json::parse(in_json + '"', nullptr, /*allow_exceptions=*/false);
  if (decoded.is_discarded()) fail_escape(end);  // half of a surrogate pair
  string_ = std::move(decoded.get_ref<std::string&>());
  if (!options_.nul_in_strings && string_.find('\0') != std::string::npos)
    fail(at_, "a string has a NUL character (\\u0000); expected text without");
}

/// The same for a text of several lines between '''. Its lines are without the blanks that are before the
/// first quote, and there is no line end before the closing ones.
void JsonReader::scan_lines() {
  const size_t close = text_.find("'''", at_ + 3);
  if (close == text_.npos) fail(text_.size(), "the text ends inside '''");
  const size_t indent = at_ - (text_.substr(0, at_).rfind('\n') + 1);  // npos + 1 is 0
  const auto past_blanks = [&](size_t at, size_t most) {
    while (most-- > 0 && is_blank(text_[at]) && text_[at] != '\n') ++at;
    return at;
  };
  size_t at = past_blanks(at_ + 3, text_.size());
  if (text_[at] == '\n') at = past_blanks(at + 1, indent);
  string_.clear();
  while (at < close) {
    const char c = text_[at];
    if (c != '\r') string_ += c;
    at = c == '\n' ? past_blanks(at + 1, indent) : at + 1;
  }
  if (string_.ends_with('\n')) string_.pop_back();
  end_ = close + 3;
}

/// true, false, null or a number before a comma, a bracket or a comment, or else the text up to the end of
/// the line.
void JsonReader::scan_unquoted() {
  if (peek() == '\0' || std::string_view("{}[],:").find(text_[at_]) != std::string_view::npos)
    fail_expecting("a value (true, false, null, a number, \"text\", [list], {section})");
  size_t end = at_;
  for (;; ++end) {
    const std::string_view rest = text_.substr(end);
    const bool line_ends = rest.empty() || rest[0] == '\r' || rest[0] == '\n';
    if (!line_ends && std::string_view(",}]#").find(rest[0]) == std::string_view::npos &&
        !rest.starts_with("//") && !rest.starts_with("/*"))
      continue;
    const std::string_view word = trimmed(text_.substr(at_, end - at_));
    if (!word.empty() &&
        (word == "true" || word == "false" || word == "null" || number_length(word) == word.size()))
      return scan_word(word);
    if (line_ends) break;
  }
  kind_ = JsonKind::kString;
  string_ = trimmed(text_.substr(at_, end - at_));
  end_ = at_ + string_.size();
  if (unquoted_ == std::string_view::npos && string_.find_first_of(",{}[]\"") != std::string::npos)
    unquoted_ = at_;
  if (half_quoted_ == std::string_view::npos && string_.find('"') != std::string::npos) half_quoted_ = at_;
}

/// true, false, null or a number.
void JsonReader::scan_word(std::string_view word) {
  if (word == "true" || word == "false") {
    kind_ = JsonKind::kBoolean;
    boolean_ = word == "true";
  } else if (word == "null") {
    kind_ = JsonKind::kNull;
  } else if (!word.empty() && (is_digit(word[0]) || word[0] == '-')) {
    scan_number(word);
  } else {
    fail_expecting("a JSON value (true, false, null, a number, \"text\", [list], {section})");
  }
  end_ = at_ + word.size();
}

void JsonReader::scan_number(std::string_view word) {
  const size_t length = number_length(word);
  if (length < word.size()) fail(at_, str("found ", token_at(at_), ", which is no JSON number"));
  const char *begin = word.data(), *end = begin + word.size();
  if (word.find_first_of(".eE") == word.npos) {
    kind_ = word[0] == '-' ? JsonKind::kNegative : JsonKind::kUnsigned;
    const std::from_chars_result read = kind_ == JsonKind::kNegative ? std::from_chars(begin, end, negative_)
                                                                     : std::from_chars(begin, end, unsigned_);
    if (read.ec == std::errc()) return;
  }
  kind_ = JsonKind::kFraction;
  if (std::from_chars(begin, end, fraction_).ec != std::errc()) {  // beyond a double, on either side
    const nlohmann::json value = nlohmann::json::parse(word, nullptr, /*allow_exceptions=*/false);
    fraction_ = value.is_discarded() ? HUGE_VAL : value.get<double>();
  }
  const bool has_digit = word.substr(0, word.find_first_of("eE")).find_first_of("123456789") != word.npos;
  if (fraction_ == 0 && has_digit)
    fail(at_, str("found ", token_at(at_),
                  ", a number too small for a double; expected 0, or one of at least 1e-308"));
  if (std::isinf(fraction_)) fail(at_, str("found ", token_at(at_), ", a number too large for a double"));
}

JsonKind JsonReader::next() {
  if (!scanned_) scan();
  return kind_;
}

/// Goes past the next value, which is a single token.
void JsonReader::take(JsonKind kind) {
  const JsonKind found = next();
  TESSERA_CHECK(found == kind, "a JSON value of another kind");
  at_ = end_;
  scanned_ = false;
}

std::string JsonReader::found(const char* array) {
  switch (next()) {
    case JsonKind::kObject: return "an object";
    case JsonKind::kArray: return array;
    case JsonKind::kString: return quoted_name(string_);
    case JsonKind::kFraction: return quoted_name(text_.substr(at_, end_ - at_));
    default: return std::string(text_.substr(at_, end_ - at_));
  }
}

std::string JsonReader::string() {
  take(JsonKind::kString);
  return std::move(string_);
}

bool JsonReader::boolean() {
  take(JsonKind::kBoolean);
  return boolean_;
}

uint64_t JsonReader::unsigned_integer() {
  take(JsonKind::kUnsigned);
  return unsigned_;
}

int64_t JsonReader::negative_integer() {
  take(JsonKind::kNegative);
  return negative_;
}

double JsonReader::fraction() {
  take(JsonKind::kFraction);
  return fraction_;
}

void JsonReader::null() { take(JsonKind::kNull); }

void JsonReader::enter_object() { enter(JsonKind::kObject); }
void JsonReader::enter_array() { enter(JsonKind::kArray); }

void JsonReader::enter(JsonKind kind) {
  const bool has_no_braces = next() == kind && end_ == at_;
  take(kind);
  open_ += has_no_braces ? '\0' : kind == JsonKind::kObject ? '}' : ']';
  is_first_ = true;
}

/// Goes past the comma before an item; false when the innermost object or array has been left.
bool JsonReader::next_item() {
  const size_t begin = at_;
  const char c = peek(), closing = open_.back();
  if (c == closing) {
    if (c != '\0') ++at_;
    open_.pop_back();
    is_first_ = false;
    return false;
  }
  if (is_first_) {
    is_first_ = false;
    return true;
  }
  if (options_.hjson) {
    const bool on_one_line = text_.substr(begin, at_ - begin).find_first_of("\r\n") == std::string_view::npos;
    if (c == '\0' || c == '}' || c == ']' || c == ':' || (options_.quoted && on_one_line && c != ','))
      fail_expecting(after_value());
    if (c != ',') return true;
    ++at_;
    is_first_ = peek() == closing;  // a comma before the end is nothing
    return is_first_ ? next_item() : true;
  }
  if (c != ',') fail_expecting(after_value());
  ++at_;
  if (peek() == '}' || peek() == ']')
    fail(at_, str("found ", token_at(at_), " after a comma; a trailing comma is not JSON"));
  return true;
}

bool JsonReader::next_key(std::string& key) {
  if (!next_item()) return false;
  const char quote = peek();
  if (quote == '"' || (options_.hjson && quote == '\'')) {
    scan_string();
    std::swap(key, string_);
  } else {
    const bool unquoted = options_.hjson && !options_.quoted;
    end_ = unquoted ? std::min(text_.find_first_of(" \t\r\n{}[],:", at_), text_.size()) : at_;
    if (end_ == at_) fail_expecting(unquoted ? after_value() : "a key in double quotes");
    key = text_.substr(at_, end_ - at_);
    if (key.find('"') != key.npos)
      fail(at_,
           str("found ", quoted_name(key), "; expected a key between quotes, or without; one is missing"));
  }
  at_ = key_end_ = end_;
  if (peek() != ':') fail_expecting("':' after a key");
  ++at_;
  return true;
}

bool JsonReader::next_element() { return next_item(); }

int JsonReader::key_line() {
  line_ += static_cast<int>(std::count(text_.begin() + counted_, text_.begin() + key_end_, '\n'));
  counted_ = key_end_;
  return line_;
}

void JsonReader::skip() {
  const JsonKind kind = next();
  if (kind == JsonKind::kObject) {
    enter_object();
    for (std::string key; next_key(key);) skip();
  } else if (kind == JsonKind::kArray) {
    enter_array();
    while (next_element()) skip();
  } else {
    take(kind);
  }
}

void JsonReader::finish() {
  if (peek() != '\0') fail(at_, str("found ", token_at(at_), " after the end of the ", options_.name));
}

namespace {

/// Builds a tree from the values of a reader. `Place`s are the keys and indices that lead to a value; they
/// become a path only for those who ask.
template <class Json>
class TreeBuilder {
 public:
  TreeBuilder(JsonReader& in, const OnJsonKey& on_key) : in_(in), on_key_(on_key) {}

  Json build() { return value(nullptr); }

 private:
  struct Place {
    const Place* parent;
    std::string_view key;
    size_t index;
    bool is_element;
  };

  static std::string path_of(const Place* place) {
    if (!place) return "";
    const std::string parent = path_of(place->parent);
    return place->is_element ? child_path(parent, place->index) : child_path(parent, place->key);
  }

  Json value(const Place* place) {
    switch (in_.next()) {
      case JsonKind::kObject: return object(place);
      case JsonKind::kArray: return array(place);
      case JsonKind::kString: return in_.string();
      case JsonKind::kUnsigned: return in_.unsigned_integer();
      case JsonKind::kNegative: return in_.negative_integer();
      case JsonKind::kFraction: return in_.fraction();
      case JsonKind::kBoolean: return in_.boolean();
      case JsonKind::kNull: in_.null(); break;
    }
    return nullptr;
  }

  Json object(const Place* parent) {
    Json out = Json::object();
    in_.enter_object();
    for (std::string key; in_.next_key(key);) {
      const Place place{parent, key, 0, false};
      const auto [member, fresh] = out.emplace(key, nullptr);
      if (!fresh) {
        const std::string path = path_of(&place);
        throw JsonError(JsonError::Kind::kKeyTwice, in_.key_offset(),
                        str(abridged(path), ": this key is given twice; expected it once"), path);
      }
      if (on_key_) on_key_(path_of(&place), in_.key_line());
      *member = value(&place);
    }
    return out;
  }

  Json array(const Place* parent) {
    Json out = Json::array();
    in_.enter_array();
    while (in_.next_element()) {
      const Place place{parent, {}, out.size(), true};
      out.push_back(value(&place));
    }
    return out;
  }

  JsonReader& in_;
  const OnJsonKey& on_key_;
};

template <class Json>
Json parse(std::string_view text, const JsonOptions& options, const OnJsonKey& on_key) {
  const auto fail_as_json = [&](size_t offset) {
    JsonOptions in_json = options;
    in_json.quoted = true;
    try {
      parse<Json>(text, in_json, {});
    } catch (const JsonError& error) {
      if (error.offset() >= offset) throw;  // else it is about something before, which Hjson has
    }
  };
  JsonReader in(text, options);
  Json tree;
  try {
    tree = TreeBuilder<Json>(in, on_key).build();
    in.finish();
  } catch (const JsonError& error) {
    if (options.hjson && !options.quoted && error.kind() == JsonError::Kind::kSyntax)
      fail_as_json(error.offset());
    throw;
  }
  if (in.half_quoted() != std::string_view::npos) fail_as_json(in.half_quoted());
  return tree;
}

}  // namespace

nlohmann::json parse_json(std::string_view text, const JsonOptions& options, const OnJsonKey& on_key) {
  return parse<nlohmann::json>(text, options, on_key);
}

nlohmann::ordered_json parse_ordered_json(std::string_view text, const JsonOptions& options) {
  return parse<nlohmann::ordered_json>(text, options, {});
}

nlohmann::json parse_json_or_discard(std::string_view text) {
  try {
    return parse_json(text);
  } catch (const JsonError&) {
    return nlohmann::json::value_t::discarded;
  }
}

std::string child_path(const std::string& parent, std::string_view name) {
  return parent.empty() ? std::string(name) : str(parent, ".", name);
}
std::string child_path(const std::string& parent, size_t index) { return str(parent, "[", index, "]"); }

}  // namespace tessera

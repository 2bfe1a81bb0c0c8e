// The strict JSON parser: positions of errors in plain words, the line of every key, no duplicate keys, and a
// limit on nesting. Values of single tokens (numbers, strings) are nlohmann's.
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>

#include "core/str.h"
#include "core/utf8.h"
#include "engine/config/document.h"

namespace tessera::config {
namespace {

using nlohmann::json;

bool is_blank(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }
bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.' || c == '+' || c == '-';
}

class Parser {
 public:
  Parser(std::string_view text, const std::string& source, Origins* origins)
      : text_(text), source_(source), origins_(origins) {}

  json parse() {
    check_bytes();
    if (std::all_of(text_.begin(), text_.end(), is_blank))
      throw ConfigError(str(source_, ": is empty; expected a JSON object"));
    if (text_.starts_with("\xef\xbb\xbf")) at_ = 3;  // byte order mark
    json value = parse_value("", 0, "the end");
    if (next() != '\0') fail(at_, str("found ", token_at(at_), " after the end of the configuration"));
    return value;
  }

 private:
  [[noreturn]] void fail(size_t offset, const std::string& what) const {
    const std::string_view before = text_.substr(0, offset);
    const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
    throw ConfigError(str(source_, ":", 1 + std::count(before.begin(), before.end(), '\n'), ":",
                          offset - line_start + 1, ": ", what));
  }
  /// A token that is not what the grammar has at this place.
  [[noreturn]] void fail_expecting(const std::string& expected) const {
    if (at_ >= text_.size()) fail(text_.size(), "the text ends too early; a '}' or ']' is missing");
    if (text_[at_] == '\'') fail(at_, "found '; JSON strings stand in double quotes");
    fail(at_, str("found ", token_at(at_), "; expected ", expected));
  }

  void check_bytes() const {
    for (size_t i = 0; i < text_.size();) {
      const auto c = static_cast<unsigned char>(text_[i]);
      const size_t length = utf8_length(text_.substr(i));
      char hex[8];
      std::snprintf(hex, sizeof hex, "0x%02x", c);
      if (length == 0) fail(i, str("byte ", hex, " is not valid UTF-8; expected a JSON text"));
      if (c < 0x20 && c != '\t' && c != '\n' && c != '\r')
        fail(i, str("control character ", hex, "; expected a JSON text"));
      i += length;
    }
  }

  /// The next character of the grammar, past blanks and comments; '\0' at the end.
  char next() {
    while (at_ < text_.size()) {
      if (is_blank(text_[at_])) {
        ++at_;
      } else if (text_.substr(at_, 2) == "//") {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (text_.substr(at_, 2) == "/*") {
        const size_t end = text_.find("*/", at_ + 2);
        if (end == text_.npos) fail(text_.size(), "the text ends inside a comment");
        at_ = end + 2;
      } else {
        return text_[at_];
      }
    }
    return '\0';
  }

  /// `after`: what may follow the value, for an error.
  json parse_value(const std::string& path, int depth, const char* after) {
    const char c = next();
    if (++num_values_ > kMaxJsonValues)
      fail(at_, str("more than ", kMaxJsonValues, " values; expected a configuration"));
    if (c == '{' || c == '[') {
      if (depth == kMaxJsonDepth) fail(at_, str("nested deeper than ", kMaxJsonDepth, " levels"));
      return c == '{' ? parse_object(path, depth + 1) : parse_array(path, depth + 1);
    }
    if (c == '"') return parse_string();
    const std::string_view word = word_at(at_);
    if (word == "true" || word == "false" || word == "null" || is_digit(c) || c == '-')
      return parse_word(word, after);
    fail_expecting("a JSON value (true, false, null, a number, \"text\", [list], {section})");
  }

  json parse_object(const std::string& path, int depth) {
    json object = json::object();
    ++at_;
    if (next() == '}') return ++at_, object;
    do {
      if (next() != '"') fail_expecting("a key in double quotes");
      const std::string name = parse_string().get<std::string>();
      const std::string key_path = child_path(path, name);
      if (object.contains(name))
        fail(at_ - 1,
             str(without_control_characters(key_path, true), ": this key is given twice; expected it once"));
      line_ += static_cast<int>(std::count(text_.begin() + counted_, text_.begin() + at_, '\n'));
      counted_ = at_;
      if (origins_) origins_->set_line(key_path, line_);
      if (next() != ':') fail_expecting("':' after a key");
      ++at_;
      object[name] = parse_value(key_path, depth, kAfterMember);
    } while (next_is_comma('}', kAfterMember));
    return object;
  }

  json parse_array(const std::string& path, int depth) {
    json array = json::array();
    ++at_;
    if (next() == ']') return ++at_, array;
    do {
      array.push_back(parse_value(child_path(path, array.size()), depth, kAfterElement));
    } while (next_is_comma(']', kAfterElement));
    return array;
  }

  /// Reads the comma or the closing bracket after a value; true for the comma.
  bool next_is_comma(char closing, const char* after) {
    const char c = next();
    if (c != ',' && c != closing) fail_expecting(after);
    ++at_;
    if (c == closing) return false;
    if (next() == '}' || next() == ']')
      fail(at_, str("found ", token_at(at_), " after a comma; a trailing comma is not JSON"));
    return true;
  }

  json parse_string() {
    size_t end = at_ + 1;
    for (; end < text_.size() && text_[end] != '"'; ++end) {
      if (static_cast<unsigned char>(text_[end]) < 0x20)
        fail(end, "a string is not closed on its line; a '\"' is missing");
      if (text_[end] != '\\' || ++end >= text_.size()) continue;
      if (std::string_view("\"\\/bfnrtu").find(text_[end]) == std::string_view::npos) fail_escape(end);
      for (int digits = text_[end] == 'u' ? 4 : 0; digits > 0; --digits)
        if (++end < text_.size() && std::isxdigit(static_cast<unsigned char>(text_[end])) == 0)
          fail_escape(end);
    }
    if (end >= text_.size()) fail(text_.size(), "the text ends inside a string");
    json value = json::parse(text_.substr(at_, end + 1 - at_), nullptr, /*allow_exceptions=*/false);
    if (value.is_discarded()) fail_escape(end);  // half of a surrogate pair
    if (value.get_ref<const std::string&>().find('\0') != std::string::npos)
      fail(at_, "a string has a NUL character (\\u0000); expected text without");
    at_ = end + 1;
    return value;
  }
  [[noreturn]] void fail_escape(size_t at) const {
    fail(at, "invalid escape in a string; JSON knows \\\" \\\\ \\/ \\b \\f \\n \\r \\t \\uXXXX");
  }

  /// true, false, null or a number.
  json parse_word(std::string_view word, const char* after) {
    size_t end = word.size();
    if (is_digit(word[0]) || word[0] == '-') {
      end = word[0] == '-' ? 1 : 0;
      const auto digits = [&] {
        if (end >= word.size() || !is_digit(word[end]))
          fail(at_, str("found ", token_at(at_), ", which is no JSON number"));
        while (end < word.size() && is_digit(word[end])) ++end;
      };
      if (end < word.size() && word[end] == '0')
        ++end;  // nothing follows a leading zero
      else
        digits();
      if (end < word.size() && word[end] == '.') ++end, digits();
      if (end < word.size() && (word[end] == 'e' || word[end] == 'E')) {
        ++end;
        if (end < word.size() && (word[end] == '+' || word[end] == '-')) ++end;
        digits();
      }
    }
    if (end < word.size()) fail_expecting(after);
    try {
      json value = json::parse(word);
      const bool has_digit = word.substr(0, word.find_first_of("eE")).find_first_of("123456789") != word.npos;
      if (value.is_number_float() && value.get<double>() == 0 && has_digit)
        fail(at_, str("found ", token_at(at_),
                      ", a number too small for a double; expected 0, or one of at least 1e-308"));
      at_ += end;
      return value;
    } catch (const json::out_of_range&) {
      fail(at_, str("found ", token_at(at_), ", a number too large for a double"));
    }
  }

  std::string_view word_at(size_t start) const {
    size_t end = start;
    while (end < text_.size() && is_word(text_[end])) ++end;
    return text_.substr(start, end - start);
  }

  std::string token_at(size_t start) const {
    std::string_view token = word_at(start);
    if (text_[start] == '"') token = text_.substr(start, text_.find_first_of("\"\n", start + 1) + 1 - start);
    if (token.empty()) token = text_.substr(start, std::max<size_t>(1, utf8_length(text_.substr(start))));
    return str("'", without_control_characters(token.substr(0, 40), true), "'");
  }

  static constexpr const char* kAfterMember = "',' or '}'";
  static constexpr const char* kAfterElement = "',' or ']'";

  std::string_view text_;
  const std::string& source_;
  Origins* origins_;
  size_t at_ = 0;
  size_t counted_ = 0;  // lines before this offset are counted in line_
  int line_ = 1;
  int num_values_ = 0;
};

}  // namespace

json parse_json(std::string_view text, const std::string& source, Origins* origins) {
  return Parser(text, source, origins).parse();
}

}  // namespace tessera::config

#include "engine/config/json.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "core/error.h"
#include "core/str.h"
#include "core/utf8.h"
#include "engine/config/document.h"

namespace tessera::config {
namespace {

using nlohmann::json;

/// Line and column (in bytes) of an offset, both from 1.
std::string position(std::string_view text, size_t offset) {
  offset = std::min(offset, text.size());
  std::string_view before = text.substr(0, offset);
  size_t line = 1 + static_cast<size_t>(std::count(before.begin(), before.end(), '\n'));
  size_t line_start = before.rfind('\n');
  size_t column = line_start == std::string_view::npos ? offset + 1 : offset - line_start;
  return str(line, ":", column);
}

[[noreturn]] void fail(std::string_view text, const std::string& source, size_t offset,
                       const std::string& what) {
  throw ConfigError(str(source, ":", position(text, offset), ": ", what));
}

/// nlohmann takes a NUL byte for the end of the input and does not look inside
/// comments, so bytes are checked first.
void check_bytes(std::string_view text, const std::string& source) {
  for (size_t i = 0; i < text.size();) {
    auto c = static_cast<unsigned char>(text[i]);
    size_t length = utf8_length(text.substr(i));
    char hex[8];
    std::snprintf(hex, sizeof hex, "0x%02x", c);
    if (length == 0) fail(text, source, i, str("byte ", hex, " is not valid UTF-8; expected a JSON text"));
    if (c < 0x20 && c != '\t' && c != '\n' && c != '\r')
      fail(text, source, i, str("control character ", hex, "; expected a JSON text"));
    i += length;
  }
}

/// Hands the text out byte by byte and counts in `consumed`, so that the parser's callbacks know where
/// they are. The lexer reads no further than the closing quote of a key.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, size_t* consumed) : at_(at), consumed_(consumed) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    ++at_;
    ++*consumed_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  size_t* consumed_;
};

/// Follows the parse: the path of the value at hand, the keys each open object already has, the line.
class Watcher {
 public:
  Watcher(std::string_view text, const std::string& source, Origins* origins, const size_t* consumed)
      : text_(text), source_(source), origins_(origins), consumed_(consumed) {}

  bool operator()(int, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start: open(false); break;
      case json::parse_event_t::array_start: open(true); break;
      case json::parse_event_t::key: key(parsed.get_ref<const std::string&>()); break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end: frames_.pop_back(); break;
      case json::parse_event_t::value: next_path(); break;
    }
    return true;
  }

 private:
  struct Frame {
    bool is_array;
    std::string path;
    std::string key_path;  // of the value that comes next, in an object
    size_t num_items = 0;
    std::set<std::string> names;
  };

  std::string next_path() {
    if (frames_.empty()) return "";
    Frame& frame = frames_.back();
    return frame.is_array ? child_path(frame.path, frame.num_items++) : frame.key_path;
  }

  void open(bool is_array) {
    if (frames_.size() >= static_cast<size_t>(kMaxJsonDepth))
      fail(text_, source_, *consumed_ - 1, str("nested deeper than ", kMaxJsonDepth, " levels"));
    frames_.push_back({is_array, next_path(), "", 0, {}});
  }

  void key(const std::string& name) {
    Frame& frame = frames_.back();
    frame.key_path = child_path(frame.path, name);
    if (!frame.names.insert(name).second)
      fail(text_, source_, *consumed_ - 1,
           str(printable(frame.key_path), ": this key is given twice; expected it once"));
    line_ += static_cast<int>(std::count(text_.begin() + counted_, text_.begin() + *consumed_, '\n'));
    counted_ = *consumed_;
    if (origins_) origins_->set_line(frame.key_path, line_);
  }

  std::string_view text_;
  const std::string& source_;
  Origins* origins_;
  const size_t* consumed_;
  std::vector<Frame> frames_;
  size_t counted_ = 0;
  int line_ = 1;
};

/// Offset where the token starts that ends just before `end`.
size_t token_start(std::string_view text, size_t end) {
  if (end == 0) return 0;
  size_t at = end - 1;
  auto is_word = [&](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '+' || c == '-';
  };
  if (text[at] == '"') {
    for (size_t i = at; i-- > 0;)
      if (text[i] == '"' && (i == 0 || text[i - 1] != '\\')) return i;
    return at;
  }
  if (is_word(text[at]))
    while (at > 0 && is_word(text[at - 1])) --at;
  return at;
}

std::string token_at(std::string_view text, size_t start) {
  if (start >= text.size()) return "the end of the text";
  size_t end = start + 1;
  auto is_word = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '+' || c == '-';
  };
  if (is_word(text[start]))
    while (end < text.size() && is_word(text[end])) ++end;
  else if (text[start] == '"')
    while (end < text.size() && text[end - 1] != '\n' && (end == start + 1 || text[end - 1] != '"')) ++end;
  else
    end = start + std::max<size_t>(1, utf8_length(text.substr(start)));
  std::string token(text.substr(start, std::min<size_t>(end - start, 40)));
  return str("'", printable(token), "'");
}

/// The last character before `offset` that is not blank.
char previous(std::string_view text, size_t offset) {
  while (offset > 0 && std::isspace(static_cast<unsigned char>(text[offset - 1]))) --offset;
  return offset > 0 ? text[offset - 1] : '\0';
}

/// nlohmann's account of a syntax error, in plain words. `message` is its what(), `byte` the number of
/// bytes read when it gave up.
[[noreturn]] void fail_syntax(std::string_view text, const std::string& source, const std::string& message,
                              size_t byte) {
  auto mentions = [&](const char* words) { return message.find(words) != std::string::npos; };
  if (byte > text.size()) {
    if (mentions("missing closing quote")) fail(text, source, text.size(), "the text ends inside a string");
    if (mentions("invalid comment")) fail(text, source, text.size(), "the text ends inside a comment");
    fail(text, source, text.size(), "the text ends too early; a '}' or ']' is missing");
  }
  size_t last = byte == 0 ? 0 : byte - 1;
  if (mentions("invalid string")) {
    if (mentions("control character"))
      fail(text, source, last, "a string is not closed on its line; a '\"' is missing");
    if (mentions("forbidden character") || mentions("'\\u'") || mentions("surrogate"))
      fail(text, source, last,
           "invalid escape in a string; JSON knows \\\" \\\\ \\/ \\b \\f \\n \\r \\t \\uXXXX");
    fail(text, source, last, "invalid string");
  }
  size_t start = token_start(text, byte);
  if (mentions("invalid number") && start > 0)
    start = token_start(text, start);  // byte stands behind the number
  std::string token = token_at(text, start);
  char before = previous(text, start);
  char found = text[start];
  if (found == '\'') fail(text, source, start, "found '; JSON strings stand in double quotes");
  if (mentions("expected end of input"))
    fail(text, source, start, str("found ", token, " after the end of the configuration"));
  if (mentions("invalid number"))
    fail(text, source, start, str("found ", token, ", which is no JSON number"));
  if ((found == '}' || found == ']') && before == ',')
    fail(text, source, start, str("found ", token, " after a comma; a trailing comma is not JSON"));
  if (mentions("parsing object key"))
    fail(text, source, start, str("found ", token, "; expected a key in double quotes"));
  if (mentions("parsing object separator"))
    fail(text, source, start, str("found ", token, "; expected ':' after a key"));
  if (mentions("parsing object")) fail(text, source, start, str("found ", token, "; expected ',' or '}'"));
  if (mentions("parsing array")) fail(text, source, start, str("found ", token, "; expected ',' or ']'"));
  fail(text, source, start,
       str("found ", token,
           "; expected a JSON value (true, false, null, a number, \"text\", [list], {section})"));
}

}  // namespace

json parse_json(std::string_view text, const std::string& source, Origins* origins) {
  check_bytes(text, source);
  auto is_blank = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
  if (std::all_of(text.begin(), text.end(), is_blank))
    throw ConfigError(str(source, ": is empty; expected a JSON object"));
  size_t consumed = 0;
  CountingIterator first(text.data(), &consumed);
  CountingIterator last(text.data() + text.size(), &consumed);
  try {
    return json::parse(first, last, Watcher(text, source, origins, &consumed), /*allow_exceptions=*/true,
                       /*ignore_comments=*/true);
  } catch (const json::parse_error& error) {
    fail_syntax(text, source, error.what(), error.byte);
  } catch (const json::out_of_range&) {
    size_t start = token_start(text, consumed);
    // The lexer has read one character beyond a number.
    if (start + 1 == consumed && consumed > 1) start = token_start(text, consumed - 1);
    fail(text, source, start, str("found ", token_at(text, start), ", a number too large for a double"));
  }
}

}  // namespace tessera::config

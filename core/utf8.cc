#include "core/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>

namespace tessera {

// The table of well-formed sequences in The Unicode Standard, chapter 3: the range of
// the second byte depends on the first.
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
  const auto follows = [&](size_t i) { return byte(i) >= 0x80 && byte(i) <= 0xbf; };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return follows(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const bool second = first == 0xe0   ? byte(1) >= 0xa0 && byte(1) <= 0xbf
                        : first == 0xed ? byte(1) >= 0x80 && byte(1) <= 0x9f
                                        : follows(1);
    return second && follows(2) ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const bool second = first == 0xf0   ? byte(1) >= 0x90 && byte(1) <= 0xbf
                        : first == 0xf4 ? byte(1) >= 0x80 && byte(1) <= 0x8f
                                        : follows(1);
    return second && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string as_utf8(std::string_view text) {
  constexpr std::string_view kReplacement = "\uFFFD";
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    out += length == 0 ? kReplacement : text.substr(0, length);
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return out;
}

size_t num_characters(std::string_view text) {
  size_t count = 0;
  for (; !text.empty(); ++count) text.remove_prefix(std::max<size_t>(1, utf8_length(text)));
  return count;
}

std::string_view first_characters(std::string_view text, size_t count) {
  size_t end = 0;
  for (; count > 0 && end < text.size(); --count) end += std::max<size_t>(1, utf8_length(text.substr(end)));
  return text.substr(0, end);
}

std::string without_control_characters(std::string_view text, bool one_line) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    // U+0080 to U+009F, too, which some terminals take for the beginning of a sequence.
    const bool is_c1 =
        byte == 0xc2 && i + 1 < text.size() && (static_cast<uint8_t>(text[i + 1]) & 0xe0) == 0x80;
    const bool is_c0 = (byte < 0x20 && (one_line || (byte != '\n' && byte != '\t'))) || byte == 0x7f;
    if (!is_c0 && !is_c1) {
      out += text[i];
      continue;
    }
    char escape[5];
    std::snprintf(escape, sizeof escape, "\\x%02x", is_c1 ? static_cast<uint8_t>(text[++i]) : byte);
    out += escape;
  }
  return out;
}

std::string abridged(std::string_view text, size_t longest) {
  std::string_view last;
  size_t left_out = 0;
  if (text.size() > longest) {
    // Not within a character.
    const auto begins = [&](size_t at) { return (static_cast<uint8_t>(text[at]) & 0xc0) != 0x80; };
    size_t first = longest - longest / 4, end = text.size() - longest / 4;
    for (int i = 0; i < 3 && !begins(first); ++i) --first;
    for (int i = 0; i < 3 && !begins(end); ++i) ++end;
    left_out = end - first;
    last = text.substr(end);
    text = text.substr(0, first);
  }
  const auto escaped = [](std::string_view part) {
    std::string out;
    while (!part.empty()) {
      const size_t length = utf8_length(part);
      if (length == 0) {
        char escape[5];
        std::snprintf(escape, sizeof escape, "\\x%02x", static_cast<uint8_t>(part[0]));
        out += escape;
      } else {
        out += part.substr(0, length);
      }
      part.remove_prefix(std::max<size_t>(1, length));
    }
    return without_control_characters(out, /*one_line=*/true);
  };
  if (left_out == 0) return escaped(text);
  return escaped(text) + "… (" + std::to_string(left_out) + " bytes more) …" + escaped(last);
}

std::string quoted_name(std::string_view name) { return "'" + abridged(name) + "'"; }

}  // namespace tessera

#include "checkpoint/formats/pickle_text.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/utf8.h"

namespace tessera::checkpoint {
namespace {

using std::string_view;

void append_surrogate(std::string& out, uint32_t code) {
  constexpr char kDigits[] = "0123456789abcdef";
  out += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) out += kDigits[code >> shift & 0xf];
}

}  // namespace

void append_utf8(std::string& out, uint32_t code) {
  const auto put = [&](uint32_t byte) { out += static_cast<char>(byte); };
  if (code < 0x80) return put(code);
  if (code < 0x800) {
    put(0xc0 | code >> 6);
  } else {
    if (code < 0x10000) {
      put(0xe0 | code >> 12);
    } else {
      put(0xf0 | code >> 18);
      put(0x80 | (code >> 12 & 0x3f));
    }
    put(0x80 | (code >> 6 & 0x3f));
  }
  put(0x80 | (code & 0x3f));
}

std::string shown_text(string_view text) {
  const string_view first = first_characters(text, 120);
  return without_control_characters(as_utf8(first), true) + (first.size() < text.size() ? "…" : "");
}

std::optional<std::string> decoded_utf8(string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    if (const size_t length = utf8_length(text); length > 0) {
      out += text.substr(0, length);
      text.remove_prefix(length);
      continue;
    }
    const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
    if (byte(0) != 0xed || (byte(1) & 0xe0) != 0xa0 || (byte(2) & 0xc0) != 0x80) return std::nullopt;
    append_surrogate(out, 0xd000u | (byte(1) & 0x3fu) << 6 | (byte(2) & 0x3fu));
    text.remove_prefix(3);
  }
  return out;
}

std::optional<std::string> encoded_latin1(string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const auto first = static_cast<uint8_t>(text[0]);
    if (first >= 0x80 && first != 0xc2 && first != 0xc3) return std::nullopt;
    const size_t length = first < 0x80 ? 1 : 2;
    out += length == 1 ? text[0] : static_cast<char>((first & 3) << 6 | (text[1] & 0x3f));
    text.remove_prefix(length);
  }
  return out;
}

std::string decimal_digits(string_view bytes) {
  const bool is_negative = (bytes.back() & 0x80) != 0;
  std::vector<uint32_t> words((bytes.size() + 3) / 4, 0);
  uint32_t carry = is_negative ? 1 : 0;
  for (size_t i = 0; i < words.size() * 4; ++i) {
    uint32_t byte = i < bytes.size() ? static_cast<uint8_t>(bytes[i]) : is_negative ? 0xffu : 0u;
    if (is_negative) {
      byte = (byte ^ 0xffu) + carry;
      carry = byte >> 8;
    }
    words[i / 4] |= (byte & 0xff) << (i % 4 * 8);
  }
  std::string reversed;
  while (!words.empty()) {
    uint64_t rest = 0;
    for (size_t i = words.size(); i-- > 0;) {
      rest = rest << 32 | words[i];
      words[i] = static_cast<uint32_t>(rest / 1'000'000'000);
      rest %= 1'000'000'000;
    }
    while (!words.empty() && words.back() == 0) words.pop_back();
    for (int digit = 0; digit < 9; ++digit, rest /= 10) reversed += static_cast<char>('0' + rest % 10);
  }
  while (reversed.size() > 1 && reversed.back() == '0') reversed.pop_back();
  if (is_negative) reversed += '-';
  return {reversed.rbegin(), reversed.rend()};
}

}  // namespace tessera::checkpoint

#include "examples/text_classification/basic_tokens.h"

#include <utf8proc.h>

#include <array>
#include <cstdint>

#include "core/check.h"

namespace tessera::examples {
namespace {

bool is_punctuation(char32_t c) {
  // As in BERT, every ASCII character that is neither letter, digit nor control is punctuation, although some
  // are symbols in Unicode ("$", "^").
  if ((c >= 33 && c <= 47) || (c >= 58 && c <= 64) || (c >= 91 && c <= 96) || (c >= 123 && c <= 126))
    return true;
  const utf8proc_category_t category = utf8proc_category(static_cast<int32_t>(c));
  return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO;
}

bool is_space(char32_t c) {
  if (c == '\t' || c == '\n' || c == '\r') return true;
  const utf8proc_category_t category = utf8proc_category(static_cast<int32_t>(c));
  return category >= UTF8PROC_CATEGORY_ZS && category <= UTF8PROC_CATEGORY_ZP;
}

/// Unassigned characters are kept.
bool is_dropped(char32_t c) {
  if (c == 0 || c == 0xfffd) return true;
  const utf8proc_category_t category = utf8proc_category(static_cast<int32_t>(c));
  return category >= UTF8PROC_CATEGORY_CC && category <= UTF8PROC_CATEGORY_CO;
}

/// The blocks of CJK ideographs, as BERT's code lists them. (Japanese and Korean letters are not among them.)
bool is_chinese(char32_t c) {
  struct Block {
    char32_t first, last;
  };
  constexpr std::array<Block, 8> kBlocks = {{{0x4e00, 0x9fff},
                                             {0x3400, 0x4dbf},
                                             {0x20000, 0x2a6df},
                                             {0x2a700, 0x2b73f},
                                             {0x2b740, 0x2b81f},
                                             {0x2b820, 0x2ceaf},
                                             {0xf900, 0xfaff},
                                             {0x2f800, 0x2fa1f}}};
  for (const Block& block : kBlocks)
    if (c >= block.first && c <= block.last) return true;
  return false;
}

std::vector<int32_t> code_points(std::string_view text, bool decompose) {
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  const auto options = static_cast<utf8proc_option_t>(decompose ? UTF8PROC_STABLE | UTF8PROC_DECOMPOSE : 0);
  std::vector<int32_t> points(text.size());
  for (;;) {
    const utf8proc_ssize_t size =
        utf8proc_decompose(bytes, static_cast<utf8proc_ssize_t>(text.size()), points.data(),
                           static_cast<utf8proc_ssize_t>(points.size()), options);
    TESSERA_CHECK(size >= 0, "utf8proc: ", utf8proc_errmsg(size));
    const bool was_enough = static_cast<size_t>(size) <= points.size();
    points.resize(static_cast<size_t>(size));
    if (was_enough) return points;
  }
}

}  // namespace

std::vector<std::u32string> basic_tokens(std::string_view text, bool lower_case) {
  std::vector<std::u32string> tokens;
  std::u32string word;
  const auto end_word = [&] {
    if (!word.empty()) tokens.push_back(std::move(word));
    word.clear();
  };
  for (const int32_t point : code_points(text, /*decompose=*/lower_case)) {
    auto c = static_cast<char32_t>(point);
    if (is_space(c)) {
      end_word();
    } else if (!is_dropped(c) && !(lower_case && utf8proc_category(point) == UTF8PROC_CATEGORY_MN)) {
      if (lower_case) c = static_cast<char32_t>(utf8proc_tolower(point));
      const bool alone = is_chinese(c) || is_punctuation(c);
      if (alone) end_word();
      word.push_back(c);
      if (alone) end_word();
    }
  }
  end_word();
  return tokens;
}

std::string to_utf8(std::u32string_view text) {
  std::string bytes;
  for (const char32_t c : text) {
    std::array<utf8proc_uint8_t, 4> encoded{};
    const utf8proc_ssize_t size = utf8proc_encode_char(static_cast<int32_t>(c), encoded.data());
    bytes.append(reinterpret_cast<const char*>(encoded.data()), static_cast<size_t>(size));
  }
  return bytes;
}

}  // namespace tessera::examples

#include "examples/text_classification/tokenizer.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/check.h"
#include "examples/text_classification/basic_tokens.h"

namespace tessera::examples {
namespace {

constexpr size_t kMaxWordCharacters = 100;  // BERT's max_input_chars_per_word

}  // namespace

std::vector<int32_t> Tokenizer::encode(std::string_view text, int64_t max_length) const {
  TESSERA_CHECK(max_length >= 2, max_length, " tokens");
  const auto room = static_cast<size_t>(max_length) - 1;  // for [SEP]
  std::vector<int32_t> ids = {vocabulary_.cls()};
  for (const std::u32string& word : basic_tokens(text, lower_case_)) {
    if (ids.size() >= room) break;
    append_word(word, ids);
  }
  ids.resize(std::min(ids.size(), room));
  ids.push_back(vocabulary_.sep());
  return ids;
}

void CharacterTokenizer::append_word(std::u32string_view word, std::vector<int32_t>& ids) const {
  for (const char32_t c : word) {
    const int32_t number = vocabulary().find(to_utf8({&c, 1}));
    ids.push_back(number < 0 ? vocabulary().unknown() : number);
  }
}

Vocabulary character_vocabulary(const std::vector<std::string_view>& texts, bool lower_case,
                                int64_t min_frequency) {
  std::map<char32_t, int64_t> counts;
  for (const std::string_view text : texts)
    for (const std::u32string& word : basic_tokens(text, lower_case))
      for (const char32_t c : word) ++counts[c];
  std::vector<std::pair<char32_t, int64_t>> frequent;
  for (const auto& [c, count] : counts)
    if (count >= min_frequency) frequent.emplace_back(c, count);
  // The map is sorted by code point, and a stable sort keeps that among equals.
  std::stable_sort(frequent.begin(), frequent.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  std::vector<std::string> tokens = {"[PAD]", "[UNK]", "[CLS]", "[SEP]"};
  for (const auto& [c, count] : frequent) tokens.push_back(to_utf8({&c, 1}));
  return Vocabulary(std::move(tokens), "the vocabulary of the training texts");
}

void WordPieceTokenizer::append_word(std::u32string_view word, std::vector<int32_t>& ids) const {
  const size_t num_before = ids.size();
  const auto whole_is_unknown = [&] {
    ids.resize(num_before);
    ids.push_back(vocabulary().unknown());
  };
  if (word.size() > kMaxWordCharacters) return whole_is_unknown();
  for (size_t begin = 0; begin < word.size();) {
    // Bytes of the rest of the word, and where each of its characters ends: pieces are prefixes of them.
    std::string rest = begin == 0 ? "" : "##";
    std::vector<size_t> ends;
    for (const char32_t c : word.substr(begin)) {
      rest += to_utf8({&c, 1});
      ends.push_back(rest.size());
    }
    int32_t number = -1;
    while (!ends.empty() && (number = vocabulary().find(std::string_view(rest).substr(0, ends.back()))) < 0)
      ends.pop_back();
    if (ends.empty()) return whole_is_unknown();
    ids.push_back(number);
    begin += ends.size();
  }
}

}  // namespace tessera::examples

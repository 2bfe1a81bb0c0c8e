#include "examples/text_classification/vocabulary.h"

#include <sstream>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/str.h"
#include "core/utf8.h"

namespace tessera::examples {

Vocabulary::Vocabulary(std::vector<std::string> tokens, const std::string& source)
    : tokens_(std::move(tokens)) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const auto fail = [&](const std::string& found) {
      throw DataError(source, ":", i + 1, ": ", found, "; expected a vocabulary, a token a line, each once");
    };
    if (tokens_[i].empty()) fail("is empty");
    const auto [place, is_new] = numbers_.emplace(tokens_[i], static_cast<int32_t>(i));
    if (!is_new)
      fail(str("the token ", quoted_name(tokens_[i]), " is on line ", place->second + 1, " already"));
  }
  const auto special = [&](const char* token) {
    const int32_t number = find(token);
    if (number < 0)
      throw DataError(source, ": has no token ", token,
                      "; expected a BERT vocabulary with [PAD], [UNK], [CLS] and [SEP]");
    return number;
  };
  pad_ = special("[PAD]");
  unknown_ = special("[UNK]");
  cls_ = special("[CLS]");
  sep_ = special("[SEP]");
}

Vocabulary Vocabulary::read(const std::string& path) {
  std::istringstream file(read_data_file(path, "a vocabulary, a token a line (data.vocab)"));
  std::vector<std::string> tokens;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (!is_utf8(line))
      throw DataError(path, ":", tokens.size() + 1, ": is not UTF-8; expected a vocabulary, a token a line");
    tokens.push_back(std::move(line));
  }
  return Vocabulary(std::move(tokens), path);
}

int32_t Vocabulary::find(std::string_view token) const {
  const auto place = numbers_.find(token);
  return place == numbers_.end() ? -1 : place->second;
}

std::string Vocabulary::text() const {
  std::string text;
  for (const std::string& token : tokens_) text += token + "\n";
  return text;
}

}  // namespace tessera::examples

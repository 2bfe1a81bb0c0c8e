// Tokenizer: converts text to token ids of a vocabulary, by characters or by BERT's WordPiece. Without
// libtorch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "examples/text_classification/vocabulary.h"

namespace tessera::examples {

/// Owns its vocabulary. Thread-safe.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  const Vocabulary& vocabulary() const { return vocabulary_; }

  /// The token ids of `text` (UTF-8) between [CLS] and [SEP]: at most `max_length` (at least 2); the
  /// rest of the text is left out. Special tokens written in the text are treated as text.
  std::vector<int32_t> encode(std::string_view text, int64_t max_length) const;

 protected:
  Tokenizer(Vocabulary vocabulary, bool lower_case)
      : vocabulary_(std::move(vocabulary)), lower_case_(lower_case) {}
  /// Appends the tokens of a word (see basic_tokens).
  virtual void append_word(std::u32string_view word, std::vector<int32_t>& ids) const = 0;

 private:
  Vocabulary vocabulary_;
  bool lower_case_;
};

/// Every character except white space is a token: for scripts without spaces, and if no vocabulary is given.
class CharacterTokenizer final : public Tokenizer {
 public:
  CharacterTokenizer(Vocabulary vocabulary, bool lower_case) : Tokenizer(std::move(vocabulary), lower_case) {}

 private:
  void append_word(std::u32string_view word, std::vector<int32_t>& ids) const override;
};

/// [PAD], [UNK], [CLS], [SEP], then the characters that occur at least `min_frequency` times in these
/// texts, the most frequent first, equally frequent ones by code point. `texts`: views of UTF-8.
Vocabulary character_vocabulary(const std::vector<std::string_view>& texts, bool lower_case,
                                int64_t min_frequency);

/// WordPiece (Schuster, Nakajima 2012) as BERT uses it: takes the longest piece of each word that is in
/// the vocabulary, then the same for the rest of the word, whose pieces begin with "##". A word that cannot
/// be split in this way, or is longer than 100 characters, is [UNK]. Equal to Hugging Face's BertTokenizer.
class WordPieceTokenizer final : public Tokenizer {
 public:
  WordPieceTokenizer(Vocabulary vocabulary, bool lower_case) : Tokenizer(std::move(vocabulary), lower_case) {}

 private:
  void append_word(std::u32string_view word, std::vector<int32_t>& ids) const override;
};

}  // namespace tessera::examples

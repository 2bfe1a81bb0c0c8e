// Tokens of characters and of word pieces, and vocabularies.
// hugging_face_tokenizer_test.py compares them with the library.
#include "examples/text_classification/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "examples/text_classification/basic_tokens.h"
#include "tests/support/errors.h"

namespace tessera::examples {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> words(const std::string& text, bool lower_case = true) {
  std::vector<std::string> words;
  for (const std::u32string& word : basic_tokens(text, lower_case)) words.push_back(to_utf8(word));
  return words;
}

TEST(BasicTokens, SeparatesWhatBertSeparates) {
  EXPECT_THAT(words(" \tHeLLo!how  \n Are yoU?  "), ElementsAre("hello", "!", "how", "are", "you", "?"));
  EXPECT_THAT(words("书很好，I like it。"), ElementsAre("书", "很", "好", "，", "i", "like", "it", "。"));
  EXPECT_THAT(words("a$b^c`d~e"), ElementsAre("a", "$", "b", "^", "c", "`", "d", "~", "e"));
  EXPECT_THAT(words("かな 한국어", false), ElementsAre("かな", "한국어"))
      << "only Chinese characters stand alone";
  EXPECT_THAT(words(""), ElementsAre());
  EXPECT_THAT(words(" \xe3\x80\x80\xe2\x80\xa8 "), ElementsAre()) << "an ideographic space, a line separator";
}

TEST(BasicTokens, LowerCaseLosesAccentsToo) {
  EXPECT_THAT(words("H\u00e9llo \u00c5ngstr\u00f6m \u0130stanbul"),
              ElementsAre("hello", "angstrom", "istanbul"));
  EXPECT_THAT(words("He\u0301llo"), ElementsAre("hello")) << "an accent of its own";
  EXPECT_THAT(words("H\u00e9llo", false), ElementsAre("H\u00e9llo"));
  EXPECT_THAT(words("\u03a3\u03a3"), ElementsAre("\u03c3\u03c3"));
  EXPECT_THAT(words("\uac01"), ElementsAre("\u1100\u1161\u11a8"))
      << "Hangul is decomposed and keeps all of it";
}

TEST(BasicTokens, DropsControlsAndReplacements) {
  EXPECT_THAT(words(std::string("a\0b\x7f", 4) + "c\u200d\ufffd" + "d\u00ad" + "e"), ElementsAre("abcde"));
}

std::vector<std::string> special(std::vector<std::string> rest) {
  rest.insert(rest.begin(), {"[PAD]", "[UNK]", "[CLS]", "[SEP]"});
  return rest;
}

std::vector<std::string> tokens_of(const Tokenizer& tokenizer, const std::string& text,
                                   int64_t max_length = 100) {
  std::vector<std::string> tokens;
  for (const int32_t id : tokenizer.encode(text, max_length))
    tokens.push_back(tokenizer.vocabulary().tokens().at(static_cast<size_t>(id)));
  return tokens;
}

TEST(WordPiece, TakesTheLongestPiece) {
  const WordPieceTokenizer tokenizer(
      Vocabulary(special({"want", "##want", "##ed", "wa", "un", "runn", "##ing", ","}), "v"), true);
  EXPECT_THAT(tokens_of(tokenizer, "UNwanted,running"),
              ElementsAre("[CLS]", "un", "##want", "##ed", ",", "runn", "##ing", "[SEP]"));
  EXPECT_THAT(tokens_of(tokenizer, "unwantedX running"),
              ElementsAre("[CLS]", "[UNK]", "runn", "##ing", "[SEP]"))
      << "all of a word or none";
  EXPECT_THAT(tokens_of(tokenizer, ""), ElementsAre("[CLS]", "[SEP]"));
  EXPECT_THAT(tokens_of(tokenizer, "un wa want wa", 4), ElementsAre("[CLS]", "un", "wa", "[SEP]"));
  EXPECT_THAT(tokens_of(tokenizer, "un unwanted", 4), ElementsAre("[CLS]", "un", "un", "[SEP]"))
      << "cut inside of a word";
  EXPECT_THAT(tokens_of(tokenizer, "un", 2), ElementsAre("[CLS]", "[SEP]"));
}

TEST(WordPiece, LongWordsAreUnknown) {
  const WordPieceTokenizer tokenizer(Vocabulary(special({"é", "##é"}), "v"), false);
  std::string word;
  for (int i = 0; i < 100; ++i) word += "é";
  EXPECT_EQ(tokens_of(tokenizer, word, 200).size(), 102u);
  EXPECT_THAT(tokens_of(tokenizer, word + "é", 200), ElementsAre("[CLS]", "[UNK]", "[SEP]"))
      << "characters count, not bytes";
}

TEST(Characters, VocabularyIsSortedByFrequencyThenCodePoint) {
  const Vocabulary vocabulary = character_vocabulary({"好好好 B b", "书a", "书"}, /*lower_case=*/true, 1);
  EXPECT_EQ(vocabulary.tokens(), special({"好", "b", "书", "a"}));
  EXPECT_EQ(character_vocabulary({"好好好 B b", "书a", "书"}, true, 2).tokens(), special({"好", "b", "书"}));
  EXPECT_EQ(character_vocabulary({"Bb"}, false, 1).tokens(), special({"B", "b"}));
  const CharacterTokenizer tokenizer(vocabulary, true);
  EXPECT_THAT(tokens_of(tokenizer, "书 B坏"), ElementsAre("[CLS]", "书", "b", "[UNK]", "[SEP]"));
  EXPECT_THAT(tokens_of(tokenizer, "书书书", 4), ElementsAre("[CLS]", "书", "书", "[SEP]"));
}

class VocabularyTest : public ::testing::Test {
 protected:
  std::string error_with(const std::string& content) const {
    std::ofstream(path_, std::ios::binary) << content;
    return error_of<DataError>([&] { Vocabulary::read(path_.string()); });
  }
  const TemporaryFolder folder_{"vocabulary"};
  const std::filesystem::path path_ = folder_.path() / "vocab.txt";
};

TEST_F(VocabularyTest, ReadsWhatItWrites) {
  const Vocabulary written(special({"a", "##b", "字"}), "v");
  std::ofstream(path_, std::ios::binary) << written.text();
  const Vocabulary read = Vocabulary::read(path_.string());
  EXPECT_EQ(read.tokens(), written.tokens());
  EXPECT_EQ(read.find("字"), 6);
  EXPECT_EQ(read.find("c"), -1);
  EXPECT_EQ(read.sep(), 3);
  EXPECT_EQ(error_with("[PAD]\r\n[UNK]\r\n[CLS]\r\n[SEP]\r\na"), "") << "Windows' line ends, none at the end";
}

TEST_F(VocabularyTest, MistakesNameFileAndLine) {
  const std::string file = path_.string();
  EXPECT_THAT(error_of<DataError>([&] { Vocabulary::read(file); }),
              AllOf(HasSubstr(file + ": cannot be read"), HasSubstr("data.vocab")));
  EXPECT_THAT(error_of<DataError>([&] { Vocabulary::read(path_.parent_path().string()); }),
              HasSubstr("cannot be read"));
  EXPECT_THAT(error_with(""), HasSubstr(file + ": has no token [PAD]"));
  EXPECT_THAT(error_with("[PAD]\n[UNK]\n[CLS]\na\n"), HasSubstr("has no token [SEP]"));
  EXPECT_THAT(error_with("[PAD]\n[UNK]\n\n[SEP]\n"), HasSubstr(file + ":3: is empty"));
  EXPECT_THAT(error_with("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[UNK]\n"),
              AllOf(HasSubstr(file + ":5: the token '[UNK]' is on line 2"), Not(HasSubstr("\n"))));
  EXPECT_THAT(error_with("[PAD]\n\xff\n"), HasSubstr(file + ":2: is not UTF-8"));
}

}  // namespace
}  // namespace tessera::examples

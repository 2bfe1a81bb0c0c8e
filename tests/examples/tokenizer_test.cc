// Tokens of characters and of word pieces, and vocabularies. hugging_face_tokenizer_test.py owns what words
// and pieces are, beside the library.
#include "examples/text_classification/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "tests/support/errors.h"

namespace tessera::examples {
namespace {

using tessera::testing::error_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

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

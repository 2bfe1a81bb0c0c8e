// Reading labelled texts, and their parts.
#include "examples/text_classification/labelled_texts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
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
namespace fs = std::filesystem;

const std::vector<std::string> kLabels = {"neg", "pos"};

class LabelledTextsTest : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& content) const {
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return (folder_ / name).string();
  }
  std::string error(const std::string& path) const {
    const std::string line = error_of<DataError>([&] { read_labelled_texts(path, kLabels); });
    EXPECT_THAT(line, Not(HasSubstr("\n")));
    return line;
  }
  const TemporaryFolder temporary_{"labelled_texts"};
  const std::filesystem::path folder_ = temporary_.path();
};

TEST_F(LabelledTextsTest, AFolderWithAFileALabel) {
  write("pos.txt", "\xef\xbb\xbf很好\n\n  good\t one \r\nlast");
  write("neg.txt", "\u3000坏\u00a0 \n\u3000\n");
  const LabelledTexts data = read_labelled_texts(folder_.string(), kLabels);
  EXPECT_THAT(data.texts, ElementsAre("坏", "很好", "good\t one", "last"));
  EXPECT_THAT(data.labels, ElementsAre(0, 1, 1, 1));
}

TEST_F(LabelledTextsTest, AFileOfLabelsAndTexts) {
  const std::string path = write("reviews.tsv", "pos\t很好\nneg\tbad\tthing\n\npos\tgood\n");
  const LabelledTexts data = read_labelled_texts(path, kLabels);
  EXPECT_THAT(data.texts, ElementsAre("bad\tthing", "很好", "good"));
  EXPECT_THAT(data.labels, ElementsAre(0, 1, 1));
}

TEST_F(LabelledTextsTest, MistakesNameFileAndLine) {
  EXPECT_THAT(error((folder_ / "nowhere").string()),
              AllOf(HasSubstr("nowhere: not found"), HasSubstr("neg.txt, pos.txt"), HasSubstr("make data")));
  write("neg.txt", "bad\n");
  EXPECT_THAT(error(folder_.string()),
              HasSubstr((folder_ / "pos.txt").string() +
                        ": cannot be read: No such file or directory; expected UTF-8 text"));
  const std::string pos = write("pos.txt", "");
  EXPECT_THAT(error(folder_.string()), HasSubstr(pos + ": has no text"));
  write("pos.txt", "\n \n");
  EXPECT_THAT(error(folder_.string()), HasSubstr(pos + ": has no text"));
  write("pos.txt", "good\n\nb\xc3\n");
  EXPECT_THAT(error(folder_.string()), HasSubstr(pos + ":3: is not UTF-8"));
  fs::remove(pos);
  fs::create_directory(pos);
  EXPECT_THAT(error(folder_.string()), HasSubstr(pos + ": cannot be read"));

  EXPECT_THAT(error(write("a.tsv", "pos\tgood\ngood\n")),
              HasSubstr("a.tsv:2: has no tab; expected \"label<TAB>text\""));
  EXPECT_THAT(error(write("a.tsv", "\npositive\tgood\n")),
              HasSubstr("a.tsv:2: the label is 'positive'; expected one of neg, pos"));
  EXPECT_THAT(error(write("a.tsv", "pos\t \n")), HasSubstr("a.tsv:1: has no text behind its label"));
  EXPECT_THAT(error(write("a.tsv", "")), HasSubstr("a.tsv: has no text"));
}

TEST_F(LabelledTextsTest, DuplicatesStayOnceAndContradictionsNot) {
  const LabelledTexts data{{"a", "b", "a", "c", "b", "d"}, {0, 0, 0, 1, 1, 1}};
  const LabelledTexts kept = without_duplicates(data);
  EXPECT_THAT(kept.texts, ElementsAre("a", "c", "d"));
  EXPECT_THAT(kept.labels, ElementsAre(0, 1, 1));
}

// The real data set, if `make data` has fetched it.
TEST(Reviews, AreAsPublished) {
  const fs::path path = fs::path(TESSERA_SOURCE_DIR) / "data/reviews";
  if (!fs::exists(path)) GTEST_SKIP() << "no data/reviews (`make data` brings it)";
  const LabelledTexts all = read_labelled_texts(path.string(), kLabels);
  EXPECT_EQ(std::count(all.labels.begin(), all.labels.end(), 1), 16548);
  EXPECT_EQ(std::count(all.labels.begin(), all.labels.end(), 0),
            18575);  // of 18,576 lines one is white space
  const LabelledTexts kept = without_duplicates(all);
  EXPECT_EQ(std::count(kept.labels.begin(), kept.labels.end(), 1), 8379 - 47);
  EXPECT_EQ(std::count(kept.labels.begin(), kept.labels.end(), 0), 9078 - 47);
}

}  // namespace
}  // namespace tessera::examples

#include "core/files/line_file.h"

#include <gtest/gtest.h>

#include "core/files/disk_error.h"
#include "core/files/temporary_folder.h"
#include "core/str.h"
#include "tests/support/errors.h"
#include "tests/support/files.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

bool all(const std::string&) { return true; }

class LineFileTest : public ::testing::Test {
 protected:
  const TemporaryFolder folder_{"lines"};
  const fs::path path_ = folder_.path() / "a.csv";
};

TEST_F(LineFileTest, StartsAnew) {
  write_text(path_, "old\n");
  LineFile file(path_, {});
  EXPECT_TRUE(file.is_new());
  EXPECT_EQ(read_text(path_), "");
  file.append("one");
  EXPECT_EQ(read_text(path_), "one\n") << "the system has it at once";
  file.append("two");
  EXPECT_EQ(read_text(path_), "one\ntwo\n");
}

TEST_F(LineFileTest, GoesOnAfterTheLinesThatAreKept) {
  write_text(path_, "step,loss\n1,0.5\n2,0.25\n");
  LineFile file(path_, [](const std::string& line) { return line[0] != '2'; });
  EXPECT_FALSE(file.is_new());
  file.append("2,0.3");
  EXPECT_EQ(read_text(path_), "step,loss\n1,0.5\n2,0.3\n");
}

// A process that is killed may have written a part of its last line.
TEST_F(LineFileTest, HalfALineIsNotKept) {
  write_text(path_, "1,0.5\n2,0.2");
  LineFile(path_, all).append("2,0.25");
  EXPECT_EQ(read_text(path_), "1,0.5\n2,0.25\n");
  write_text(path_, "1,0.");
  EXPECT_TRUE(LineFile(path_, all).is_new());
}

TEST_F(LineFileTest, TheFileIsKeptAsideIfLinesCannotBeRead) {
  const auto readable = [](const std::string& line) { return line[0] != '?'; };
  const auto keep = [](const std::string& line) { return line[0] < '8'; };
  const std::string damaged = std::string("1\n?\n2\n?\n?\n?\n3\n9\n") + std::string(2, '\0') + "\n4\n5";
  for (const char* aside : {"a.csv.damaged", "a.csv.damaged-2"}) {
    write_text(path_, damaged);
    LineFile file(path_, keep, readable);
    EXPECT_EQ(file.damage(), str(path_,
                                 ": 5 of its 11 lines cannot be read (lines 2, 4 to 6, 11) and are left out; "
                                 "the file as it was is ",
                                 folder_.path() / aside));
    EXPECT_EQ(read_text(folder_.path() / aside), damaged);
    EXPECT_EQ(read_text(path_), std::string("1\n2\n3\n") + std::string(2, '\0') + "\n4\n");
  }
  const LineFile again(path_, keep, readable);
  EXPECT_EQ(again.damage(), "");
  EXPECT_FALSE(fs::exists(folder_.path() / "a.csv.damaged-3"));
}

TEST_F(LineFileTest, WhatCannotBeWrittenIsNamed) {
  const fs::path path = folder_.path() / "not there" / "a.csv";
  const std::string error = testing::error_of<DiskError>([&] { LineFile(path, all); });
  EXPECT_NE(error.find(path.string()), error.npos) << error;
}

}  // namespace
}  // namespace tessera

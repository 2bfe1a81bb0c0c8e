#include "core/line_file.h"

#include <gtest/gtest.h>

#include "core/disk_error.h"
#include "core/temporary_folder.h"
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

TEST_F(LineFileTest, WhatCannotBeWrittenIsNamed) {
  const fs::path path = folder_.path() / "not there" / "a.csv";
  const std::string error = testing::error_of<DiskError>([&] { LineFile(path, all); });
  EXPECT_NE(error.find(path.string()), error.npos) << error;
}

}  // namespace
}  // namespace tessera

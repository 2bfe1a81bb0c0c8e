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

void write_text(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

TEST(LineFile, StartsAnew) {
  const TemporaryFolder folder("lines");
  const fs::path path = folder.path() / "a.csv";
  write_text(path, "old\n");
  LineFile file(path, {});
  EXPECT_TRUE(file.is_new());
  EXPECT_EQ(read_text(path), "");
  file.append("one");
  EXPECT_EQ(read_text(path), "one\n") << "the system has it at once";
  file.append("two");
  EXPECT_EQ(read_text(path), "one\ntwo\n");
}

TEST(LineFile, GoesOnAfterTheLinesThatAreKept) {
  const TemporaryFolder folder("lines");
  const fs::path path = folder.path() / "a.csv";
  write_text(path, "step,loss\n1,0.5\n2,0.25\n");
  LineFile file(path, [](const std::string& line) { return line[0] != '2'; });
  EXPECT_FALSE(file.is_new());
  file.append("2,0.3");
  EXPECT_EQ(read_text(path), "step,loss\n1,0.5\n2,0.3\n");
}

// A process that is killed may have written a part of its last line.
TEST(LineFile, HalfALineIsNotKept) {
  const TemporaryFolder folder("lines");
  const fs::path path = folder.path() / "a.csv";
  write_text(path, "1,0.5\n2,0.2");
  LineFile(path, all).append("2,0.25");
  EXPECT_EQ(read_text(path), "1,0.5\n2,0.25\n");
  write_text(path, "1,0.");
  EXPECT_TRUE(LineFile(path, all).is_new());
}

TEST(LineFile, WhatCannotBeWrittenIsNamed) {
  const TemporaryFolder folder("lines");
  const fs::path path = folder.path() / "not there" / "a.csv";
  const std::string error = testing::error_of<DiskError>([&] { LineFile(path, all); });
  EXPECT_NE(error.find(path.string()), error.npos) << error;
}

}  // namespace
}  // namespace tessera

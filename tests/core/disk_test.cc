#include "core/disk.h"

#include <gtest/gtest.h>

#include "core/temporary_folder.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

TEST(ReplaceFile, LeavesTheFileAlone) {
  const TemporaryFolder folder("disk");
  const fs::path path = folder.path() / "a";
  for (const std::string content : {"the first, longer", "second", ""}) {
    replace_file(path, content);
    EXPECT_EQ(InputFile(path).read_all(100), content);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1) << "no temporary file stays";
}

TEST(ReplaceFile, SaysWhichFileItCannotWrite) {
  const TemporaryFolder folder("disk");
  EXPECT_NE(testing::error_of<DiskError>([&] { replace_file(folder.path() / "none" / "a", "x"); }).find("none/a"), std::string::npos);
  fs::create_directory(folder.path() / "folder");
  EXPECT_NE(testing::error_of<DiskError>([&] { replace_file(folder.path() / "folder", "x"); }), "");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1) << "no temporary file stays";
}

}  // namespace
}  // namespace tessera

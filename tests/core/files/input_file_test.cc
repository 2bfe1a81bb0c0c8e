// Opening inputs: regular files are read, everything else is refused at once.
#include "core/files/input_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstring>
#include <fstream>

#include "core/files/mapped_file.h"
#include "core/files/temporary_folder.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using ::testing::HasSubstr;

TEST(Input, ReadsFiles) {
  const TemporaryFolder folder("input");
  const fs::path path = folder.path() / "a";
  std::ofstream(path) << "0123456789";
  const InputFile file(path);
  EXPECT_EQ(file.bytes(), 10);
  EXPECT_EQ(file.read_all(10), "0123456789");
  EXPECT_THAT(error_of<DiskError>([&] { file.read_all(9); }),
              HasSubstr("a has 10 bytes, expected at most 9"));
  std::string part(4, ' ');
  EXPECT_EQ(file.read_some(8, std::as_writable_bytes(std::span(part))), 2u);
  EXPECT_EQ(part, "89  ");
  EXPECT_THAT(error_of<DiskError>([&] { file.read_at(8, std::as_writable_bytes(std::span(part))); }),
              HasSubstr("up to byte 12: it ends at byte 10"));
  EXPECT_EQ(read_data_file(path, "digits"), "0123456789");
  fs::create_symlink("a", folder.path() / "link");
  EXPECT_EQ(InputFile(folder.path() / "link").read_all(), "0123456789");
}

TEST(Input, RefusesWhatIsNoRegularFileAtOnce) {
  const TemporaryFolder folder("input");
  const fs::path fifo = folder.path() / "fifo", socket_file = folder.path() / "socket";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  std::strncpy(address.sun_path, socket_file.c_str(), sizeof address.sun_path - 1);
  ASSERT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  for (const auto& [path, kind] : {std::pair<fs::path, const char*>{fifo, "FIFO and not a regular file"},
                                   {"/dev/zero", "character device and not a regular file"},
                                   {socket_file, "socket"},
                                   {folder.path(), "Is a directory"},
                                   {folder.path() / "none", "No such file or directory"}}) {
    EXPECT_THAT(error_of<DiskError>([&] { InputFile{path}; }), HasSubstr(kind)) << path;
    EXPECT_THAT(error_of<DiskError>([&] { open_input(path); }), HasSubstr(path.string()));
    EXPECT_THAT(error_of<DataError>([&] { MappedFile{path}; }), HasSubstr(kind)) << path;
    EXPECT_THAT(error_of<DataError>([&] { read_data_file(path, "a text"); }), HasSubstr("; expected a text"))
        << path;
  }
}

}  // namespace
}  // namespace tessera

#include "launcher/process/tee.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "core/files/file_descriptor.h"
#include "core/str.h"
#include "tests/launcher/tool.h"

namespace tessera::launcher {
namespace {

using testing::Folder;

/// Lines that fit into no pipe, and that tell where one is missing.
std::string many_lines() {
  std::string text;
  for (int line = 0; text.size() < (8 << 20); ++line) text += str("step ", line, " of rank 0\n");
  return text;
}

std::string read_to_end(int fd) {
  std::string text;
  char buffer[65536];
  for (ssize_t n = 0; (n = ::read(fd, buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<size_t>(n));
  return text;
}

/// An output as a program has it that sshd, or a shell, has started.
struct Connection {
  explicit Connection(bool is_socket) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(is_socket ? ::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) : ::pipe(ends), 0);
    reader = FileDescriptor(ends[0]);
    writer = FileDescriptor(ends[1]);
  }
  FileDescriptor reader, writer;
};

class TeeTest : public ::testing::TestWithParam<bool> {
 protected:
  TeeTest() { ::signal(SIGPIPE, SIG_IGN); }
  std::string path() const { return folder_.path("out"); }
  Folder folder_;
  Connection connection_{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Outputs, TeeTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "socket" : "pipe"; });

/// A connection that is stopped takes no more than its buffer holds.
TEST_P(TeeTest, AReaderThatIsStoppedHoldsUpNobody) {
  const std::string text = many_lines();
  std::ofstream(path()) << text;
  std::optional<Tee> tee(std::in_place, std::vector<ShownFile>{{path(), "", connection_.writer.get()}});
  tee.reset();  // would never return
  EXPECT_EQ(::fcntl(connection_.writer.get(), F_GETFL) & O_NONBLOCK, 0) << "others have inherited it";
  connection_.writer.reset();
  const std::string shown = read_to_end(connection_.reader.get());
  EXPECT_GT(shown.size(), 0u);
  EXPECT_LT(shown.size(), text.size());
  EXPECT_EQ(shown, text.substr(0, shown.size()));
}

TEST_P(TeeTest, AReaderThatGoesOnGetsAll) {
  const std::string text = many_lines();
  std::ofstream(path()) << text;
  std::optional<Tee> tee(std::in_place, std::vector<ShownFile>{{path(), "", connection_.writer.get()}});
  std::string shown(1, ' ');
  ASSERT_EQ(::read(connection_.reader.get(), shown.data(), 1), 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the output is full
  std::thread reader([&] { shown += read_to_end(connection_.reader.get()); });
  std::ofstream(path(), std::ios::app) << "the last line, without an end";
  tee.reset();
  connection_.writer.reset();
  reader.join();
  EXPECT_TRUE(shown == text + "the last line, without an end") << shown.size() << " of " << text.size();
}

TEST_P(TeeTest, AReaderThatIsGoneHoldsUpNobody) {
  std::ofstream(path()) << many_lines();
  connection_.reader.reset();
  const Tee tee({{path(), "", connection_.writer.get()}});
}

TEST(TeeErrors, AnOutputThatIsFullIsSaidOnce) {
  Folder folder;
  std::ofstream(folder.path("out")) << "important\n";
  const FileDescriptor full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  std::vector<int> errors;
  {
    const Tee tee({{folder.path("out"), "", full.get()}}, [&](int error) { errors.push_back(error); });
  }
  EXPECT_EQ(errors, std::vector<int>{ENOSPC});
}

TEST_P(TeeTest, LinesOfSeveralRanksStayWhole) {
  std::vector<ShownFile> files;
  std::string expected[2];
  for (int rank : {0, 1}) {
    files.push_back({folder_.path(str("out", rank)), str("[rank ", rank, "] "), connection_.writer.get()});
    std::ofstream file(files.back().path);
    for (int line = 0; line < 20000; ++line) {
      file << "line " << line << (line % 3 == 0 ? "\r" : "\n");
      expected[rank] += str("[rank ", rank, "] line ", line, "\n");
    }
    file << "no end";
    expected[rank] += str("[rank ", rank, "] no end\n");
  }
  std::string shown;
  std::thread reader([&] { shown = read_to_end(connection_.reader.get()); });
  {
    const Tee tee(files);
  }
  connection_.writer.reset();
  reader.join();
  std::string found[2];
  std::istringstream lines(shown);
  for (std::string line; std::getline(lines, line);) {
    ASSERT_TRUE(line.starts_with("[rank 0] ") || line.starts_with("[rank 1] ")) << line;
    found[line[6] - '0'] += line + "\n";
  }
  EXPECT_TRUE(found[0] == expected[0]);
  EXPECT_TRUE(found[1] == expected[1]);
}

}  // namespace
}  // namespace tessera::launcher

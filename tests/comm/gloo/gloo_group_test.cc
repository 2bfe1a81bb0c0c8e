// Connecting Gloo while programs outside of the run have taken ranks' places [Note: proven connections].
#include "comm/gloo/gloo.h"

#include <ATen/ATen.h>
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "core/files/file_descriptor.h"
#include "core/files/temporary_folder.h"
#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using std::chrono::seconds;

constexpr int kSize = 3;

/// Ports where this process listens on 127.0.0.1.
std::set<int> listening_ports() {
  std::set<int> ports;
  for (int fd = 0; fd < 1024; ++fd) {
    int listens = 0;
    socklen_t length = sizeof(listens);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || listens == 0) continue;
    sockaddr_in address{};
    length = sizeof(address);
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 && address.sin_family == AF_INET)
      ports.insert(ntohs(address.sin_port));
  }
  return ports;
}

/// A connection that has sent the number by which Gloo knows one of the connections that it waits for.
FileDescriptor stranger(int port, int64_t number) {
  FileDescriptor fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(send(fd.get(), &number, sizeof(number), 0), static_cast<ssize_t>(sizeof(number)));
  return fd;
}

/// The numbers of the devices' connections begin at 0, as if a stranger had found out where they begin.
class GlooGroupTest : public ::testing::Test {
 protected:
  GlooGroupTest()
      : GlooGroupTest([](const GlooOptions& options) -> GlooDevices {
          return {c10d::ProcessGroupGloo::createDeviceForHostname(options.address)};
        }) {}
  explicit GlooGroupTest(const std::function<GlooDevices(const GlooOptions&)>& open) {
    const std::set<int> before = listening_ports();
    for (int rank = 0; rank < kSize; ++rank) {
      GlooOptions& options = options_.emplace_back();
      options.rank = rank;
      options.names = all_ranks(kSize);
      options.timeout = options.connect_timeout = seconds(20);
      options.devices = open(options);
      options.log = Logger({.terminal = false, .file = log_file().string()});
    }
    for (const int port : listening_ports())
      if (!before.contains(port)) ports_.push_back(port);
    EXPECT_EQ(ports_.size(), size_t{kSize});
  }

  /// Of each port the first `count` numbers.
  void take_places(int count, bool stay) {
    for (const int port : ports_)
      for (int number = 0; number < count; ++number) {
        FileDescriptor connection = stranger(port, number);
        if (stay) strangers_.push_back(std::move(connection));
      }
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // Gloo has read them
  }

  /// By rank: what connecting and a sum threw; empty: nothing, and the sum was right.
  std::vector<std::string> connect_all() {
    const GroupStore store(c10::make_intrusive<c10d::HashStore>(), "the threads' store");
    std::vector<std::string> errors(kSize);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kSize; ++rank)
      threads.emplace_back([&, rank] {
        errors[static_cast<size_t>(rank)] = testing::error_of([&] {
          const auto transport = make_gloo_transport(store, options_[static_cast<size_t>(rank)],
                                                     [](const std::string&, uint32_t) {});
          at::Tensor numbers = testing::filled(rank, 0, 1000, at::kFloat);
          transport->all_reduce(numbers, 1.0, 100)->wait(seconds(20));
          if (!numbers.equal(testing::summed(kSize, 0, 1000, at::kFloat))) throw CommError("a wrong sum");
        });
      });
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

  std::filesystem::path log_file() const { return folder_.path() / "log"; }
  std::string log() const {
    std::ostringstream text;
    text << std::ifstream(log_file()).rdbuf();
    return text.str();
  }

  const TemporaryFolder folder_{"gloo_group_test"};
  std::vector<GlooOptions> options_;
  std::vector<int> ports_;
  std::vector<FileDescriptor> strangers_;
};

TEST_F(GlooGroupTest, UndisturbedItConnectsAtOnce) {
  EXPECT_EQ(connect_all(), std::vector<std::string>(kSize));
  EXPECT_EQ(log(), "");
}

class OpenedGlooGroupTest : public GlooGroupTest {
 protected:
  OpenedGlooGroupTest() : GlooGroupTest(open_gloo_devices) {}
};

TEST_F(OpenedGlooGroupTest, TheFirst1000NumbersAreNoPlaces) {
  take_places(300, /*stay=*/true);
  for (const int port : ports_) strangers_.push_back(stranger(port, 1000));
  EXPECT_EQ(connect_all(), std::vector<std::string>(kSize));
  EXPECT_EQ(log(), "");
}

TEST_F(GlooGroupTest, StrangersThatCloseTheirConnections) {
  take_places(kSize, /*stay=*/false);
  EXPECT_EQ(connect_all(), std::vector<std::string>(kSize));
  EXPECT_NE(log().find("cannot connect to the other ranks over 127.0.0.1 ("), std::string::npos) << log();
  EXPECT_NE(log().find("); connecting again\n"), std::string::npos) << log();
}

TEST_F(GlooGroupTest, StrangersThatStayAndAreSilent) {
  take_places(kSize, /*stay=*/true);
  EXPECT_EQ(connect_all(), std::vector<std::string>(kSize));
  EXPECT_NE(log().find("); connecting again\n"), std::string::npos) << log();
}

TEST_F(GlooGroupTest, StrangersWithoutEndAreAnErrorOnAllRanks) {
  take_places(100, /*stay=*/false);
  const std::vector<std::string> errors = connect_all();
  EXPECT_NE(errors[0].find(" cannot connect to the other ranks over 127.0.0.1 ("), std::string::npos)
      << errors[0];
  EXPECT_EQ(errors, std::vector<std::string>(kSize, errors[0]));
}

}  // namespace
}  // namespace tessera::comm

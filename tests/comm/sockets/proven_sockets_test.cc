// comm/sockets/proven_sockets.h: ranks connect while strangers do, and nobody takes a rank's place.
#include "comm/sockets/proven_sockets.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <thread>

#include "comm/sockets/open_files.h"
#include "comm/sockets/tcp.h"
#include "core/str.h"
#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

const std::string kKey = "00112233445566778899aabbccddeeff";

/// A listener on a free port of 127.0.0.1.
struct Listener {
  Listener() {
    auto& in = reinterpret_cast<sockaddr_in&>(address.address);
    in.sin_family = AF_INET;
    in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.length = sizeof in;
    socket = listen_at(AF_INET, reinterpret_cast<const sockaddr*>(&in), sizeof in);
    in.sin_port = htons(static_cast<uint16_t>(port_of(socket.get())));
  }
  FileDescriptor connected() const {
    FileDescriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.address), address.length) != 0)
      fd.reset();
    return fd;
  }

  SocketAddress address;
  FileDescriptor socket;
};

/// Ranks 0 and 1, which want a socket between them.
struct Pair {
  explicit Pair(const std::string& key_of_1 = kKey) {
    ranks[0] = std::make_unique<ProvenSockets>(std::move(listener.socket), 0, kKey);
    ranks[1] = std::make_unique<ProvenSockets>(std::move(other.socket), 1, key_of_1);
    ranks[1]->connect(0, 7, listener.address);
  }
  /// By turns of a millisecond, as long as they have no socket. The kernel connects again after a second
  /// where a listener's queue was full: that is more turns than `most`, on a machine of any speed.
  bool meet(int most = 300) {
    for (int turn = 0; turn < most && !(sockets[0] && sockets[1]); ++turn)
      for (const int rank : {0, 1}) {
        ranks[rank]->advance(milliseconds(1));
        if (!sockets[rank]) sockets[rank] = ranks[rank]->take(1 - rank, 7);
      }
    return sockets[0] && sockets[1];
  }

  Listener listener, other;
  std::unique_ptr<ProvenSockets> ranks[2];
  FileDescriptor sockets[2];  ///< each rank's, once it is proven
};

size_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

TEST(ProvenSockets, TheTwoEndsAreOneConnection) {
  Pair pair;
  ASSERT_TRUE(pair.meet());
  const FileDescriptor &zero = pair.sockets[0], &one = pair.sockets[1];
  EXPECT_FALSE(pair.ranks[0]->take(1, 7));
  ASSERT_EQ(::send(zero.get(), "hello", 5, 0), 5);
  char text[6] = {};
  ASSERT_TRUE(await_event(one.get(), POLLIN, Clock::now() + std::chrono::seconds(5)));
  ASSERT_EQ(::recv(one.get(), text, sizeof text, 0), 5);
  EXPECT_STREQ(text, "hello");
}

TEST(ProvenSockets, ARankWithAnotherKeyIsNotTaken) {
  Pair pair("another key, as long as the other");
  EXPECT_FALSE(pair.meet());
  EXPECT_FALSE(pair.sockets[0]);
}

/// More than the listener's queue holds, before the rank comes.
TEST(ProvenSockets, StrangersThatConnectAndCloseDoNotFillTheQueue) {
  Pair pair;
  for (int i = 0; i < 10'000; ++i) {
    ASSERT_TRUE(pair.listener.connected()) << i;
    if (i % 500 == 0) pair.ranks[0]->advance(milliseconds(0));
  }
  EXPECT_TRUE(pair.meet());
}

TEST(ProvenSockets, OfStrangersThatStayFewAreKept) {
  Pair pair;
  std::vector<FileDescriptor> strangers;
  const size_t before = open_files();
  for (int i = 0; i < 300; ++i) {
    strangers.push_back(pair.listener.connected());
    if (i % 2 == 0) ::send(strangers.back().get(), "GET / HTTP/1.1\r\n", 16, MSG_NOSIGNAL);
    pair.ranks[0]->advance(milliseconds(0));
  }
  EXPECT_LE(open_files(), before + 300 + ProvenSockets::kMostStrangers + 1);
  EXPECT_TRUE(pair.meet());
}

TEST(ProvenSockets, OneThatConnectsAllTheTimeHoldsNobodyUp) {
  Pair pair;
  std::atomic<bool> ended = false;
  std::atomic<int> connections = 0;
  std::thread stranger([&] {
    while (!ended) connections += pair.listener.connected() ? 1 : 0;
  });
  while (connections < 100) std::this_thread::yield();
  EXPECT_TRUE(pair.meet(100'000)) << "its connections end turns early";
  ended = true;
  stranger.join();
}

/// What rank 1 has said, said again by a stranger, does not give it rank 1's place.
TEST(ProvenSockets, WhatWasRecordedIsNotTakenAgain) {
  Pair pair;
  Listener recorder;  // rank 1 believes that rank 0 is there
  ProvenSockets one(std::move(pair.other.socket), 1, kKey);
  one.connect(0, 7, recorder.address);
  std::string hello(4096, '\0');
  FileDescriptor recorded;
  while (!recorded) {
    one.advance(milliseconds(1));
    fcntl(recorder.socket.get(), F_SETFL, O_NONBLOCK);
    recorded = FileDescriptor(::accept(recorder.socket.get(), nullptr, nullptr));
  }
  one.advance(milliseconds(10));
  ASSERT_TRUE(await_event(recorded.get(), POLLIN, Clock::now() + std::chrono::seconds(5)));
  hello.resize(static_cast<size_t>(::recv(recorded.get(), hello.data(), hello.size(), 0)));
  const FileDescriptor stranger = pair.listener.connected();
  ASSERT_EQ(::send(stranger.get(), hello.data(), hello.size(), 0), static_cast<ssize_t>(hello.size()));
  for (int i = 0; i < 20; ++i) pair.ranks[0]->advance(milliseconds(1));
  EXPECT_FALSE(pair.ranks[0]->take(1, 7)) << "it was answered with a new word, and does not know the key";
  EXPECT_TRUE(pair.meet());
}

// More than a rank works at at a time, of which some never answer.
TEST(ProvenSockets, EachPairOfManyRanksMeets) {
  constexpr int kNum = ProvenSockets::kMostAtOnce + 8;
  raise_open_files(kNum, /*serves_store=*/false, "gloo");
  std::vector<Listener> listeners(kNum), silent(ProvenSockets::kMostAtOnce - 1);
  std::vector<std::unique_ptr<ProvenSockets>> ranks;
  for (int rank = 0; rank < kNum; ++rank)
    ranks.push_back(std::make_unique<ProvenSockets>(std::move(listeners[rank].socket), rank, kKey));
  for (size_t i = 0; i < silent.size(); ++i)
    ranks.back()->connect(kNum + static_cast<int>(i), 0, silent[i].address);
  std::vector<std::pair<int, int>> missing;
  for (int rank = 0; rank < kNum; ++rank)
    for (int other = 0; other < kNum; ++other) {
      if (other < rank) ranks[rank]->connect(other, 0, listeners[other].address);
      if (other != rank) missing.emplace_back(rank, other);
    }
  const auto give_up = Clock::now() + std::chrono::minutes(2);
  while (!missing.empty() && Clock::now() < give_up) {
    for (const auto& rank : ranks) rank->advance(milliseconds(0));
    std::erase_if(missing, [&](const auto& pair) {
      return static_cast<bool>(ranks[pair.first]->take(pair.second, 0));
    });
  }
  EXPECT_TRUE(missing.empty()) << missing.size() << " ends are missing";
}

TEST(ProvenSockets, AListenerThatIsClosedIsKnownAtOnce) {
  Pair pair;
  pair.ranks[0].reset();
  for (int turn = 0; turn < 1000 && pair.ranks[1]->refused().empty(); ++turn)
    pair.ranks[1]->advance(milliseconds(1));
  EXPECT_EQ(pair.ranks[1]->refused(), std::vector<int>{0});
  EXPECT_EQ(pair.ranks[1]->last_error(0), ECONNREFUSED);
}

}  // namespace
}  // namespace tessera::comm

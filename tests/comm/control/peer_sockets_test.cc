// comm/control/peer_sockets.h: the limits of its waits, and what it refuses.
#include "comm/control/peer_sockets.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <array>
#include <memory>
#include <thread>

#include "comm/control/group_store.h"
#include "core/str.h"
#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using testing::error_of;

GroupStore new_store() { return {c10::make_intrusive<c10d::HashStore>(), "the test's store"}; }

/// The sockets of ranks 0 and 1.
std::array<std::unique_ptr<shm::PeerSockets>, 2> two_peers() {
  const GroupStore store = new_store();
  std::array<std::unique_ptr<shm::PeerSockets>, 2> peers;
  std::thread other([&] {
    peers[1] = std::make_unique<shm::PeerSockets>(store, 1, std::vector{0, 1}, std::chrono::seconds(10));
  });
  peers[0] = std::make_unique<shm::PeerSockets>(store, 0, std::vector{0, 1}, std::chrono::seconds(10));
  other.join();
  return peers;
}

TEST(PeerSockets, ConnectingHasALimit) {
  EXPECT_EQ(error_of([] { shm::PeerSockets(new_store(), 0, {0, 1}, milliseconds(200)); }),
            "rank 1 did not set up shared memory within 0.2 s");
  const GroupStore store = new_store();
  store.set("socket/1", std::string(32, '0'));  // rank 1 has got this far
  EXPECT_EQ(error_of([&] { shm::PeerSockets(store, 0, {0, 1}, milliseconds(200)); }),
            "rank 1 has no connection to rank 0 over a Unix socket within 0.2 s");
}

TEST(PeerSockets, ReceivingHasALimit) {
  const auto peers = two_peers();
  int num_looks = 0;
  const auto watch = [&] {
    if (++num_looks > 100) throw std::logic_error("it still waits");
  };
  EXPECT_EQ(error_of([&] { peers[1]->receive(0, milliseconds(200), watch); }),
            "timed out after 0.2 s: rank 0 has sent no shared memory");
}

TEST(PeerSockets, SendingHasALimit) {
  const auto peers = two_peers();
  const auto send_for_ever = [&] {
    for (int i = 0; i < 1'000'000; ++i) peers[0]->send(1, -1, i, milliseconds(200));
  };
  EXPECT_EQ(error_of(send_for_ever), "timed out after 0.2 s: rank 1 takes no shared memory");
}

TEST(PeerSockets, WhatTheStoreHasIsTakenOnlyInTheRightLength) {
  for (const size_t length : {size_t{0}, size_t{31}, size_t{33}, size_t{4000}}) {
    const GroupStore store = new_store();
    store.set("socket/0", std::string(length, 'x'));
    EXPECT_EQ(error_of([&] { shm::PeerSockets(store, 1, {0, 1}, milliseconds(200)); }),
              str("the store has ", length, " bytes as socket/0, not 32"));
  }
  const GroupStore store = new_store();
  std::thread zero(
      [&] { EXPECT_NE(error_of([&] { shm::PeerSockets(store, 0, {0, 1}, milliseconds(500)); }), ""); });
  while (!store.has("socket/0")) std::this_thread::yield();
  store.set("key", "short");
  EXPECT_EQ(error_of([&] { shm::PeerSockets(store, 1, {0, 1}, milliseconds(500)); }),
            "the store has 5 bytes as key, not 32");
  zero.join();
}

}  // namespace
}  // namespace tessera::comm

#include "comm/init/transport_communicator.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <latch>
#include <thread>

#include "core/error.h"
#include "tests/comm/stream_transport.h"
#include "tests/support/errors.h"

namespace tessera::comm {
namespace {

using testing::Stream;

constexpr auto kForever = std::chrono::hours(1);

/// Runs `body` on two ranks, whose collectives are those of a stream each.
void run_on_streams(const std::function<void(TransportCommunicator&, Stream&)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::jthread> threads;
  for (int rank : {0, 1})
    threads.emplace_back([&body, store, rank] {
      const GroupStore shared(store, "the store");
      const auto context = std::make_shared<GroupContext>(shared, rank, 2, /*serves_store=*/false);
      const auto stream = std::make_shared<Stream>();
      const auto comm = std::make_shared<TransportCommunicator>(
          context, kForever, [&](const GroupStore&, const FailureHook&) {
            return std::make_unique<testing::StreamTransport>(stream);
          });
      body(*comm, *stream);
    });
}

TEST(TransportCommunicator, AFailureElsewhereEndsAWaitForTheDevice) {
  std::string next, waited, exchanged;
  run_on_streams([&](TransportCommunicator& comm, Stream& stream) {
    const WorkPtr work = comm.all_reduce(at::ones({8}), "numbers");
    work->wait();
    if (comm.rank() == 1) return comm.abort("its data is damaged");
    stream.synchronize();
    waited = testing::error_of([&] { work->wait(); });
    next = testing::error_of([&] { comm.all_reduce(at::ones({8}), "the next"); });
    exchanged = testing::error_of([&] { comm.exchange("", "what all agree on"); });
  });
  const std::string expected =
      "all_reduce of \"numbers\" (8 x Float), collective 1: rank 1 left the group: its data is damaged";
  EXPECT_EQ(waited, expected);
  EXPECT_EQ(next, expected);
  EXPECT_EQ(exchanged, expected);
}

/// A rank that has ended in order has done its part.
TEST(TransportCommunicator, ARankThatIsDoneEndsNoWait) {
  std::latch is_done(1);
  run_on_streams([&](TransportCommunicator& comm, Stream& stream) {
    comm.all_reduce(at::ones({8}), "numbers")->wait();
    if (comm.rank() == 1) {
      stream.end();
      return is_done.count_down();
    }
    is_done.wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    EXPECT_FALSE(stream.has_ended());
    stream.end();
    comm.all_reduce(at::ones({8}), "the next")->wait();
  });
}

}  // namespace
}  // namespace tessera::comm

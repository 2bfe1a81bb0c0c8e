// Real devices: NCCL, one rank per device, as threads; staged, with ranks as processes that share one device,
// and with one for each. Skipped without a device.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "comm/init/cuda_choice.h"
#include "comm/init/transport_communicator.h"
#include "comm/nccl/nccl.h"
#include "core/error.h"
#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using testing::filled;
using testing::summed;

void check_collectives(Communicator& comm, at::Device device) {
  const int size = comm.size();
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kShort}) {
    constexpr int64_t kNumel = 1001;
    at::Tensor sum = filled(comm.rank(), 0, size * kNumel, dtype).to(device);
    comm.all_reduce(sum, "sum")->wait();
    EXPECT_TRUE(at::equal(sum.cpu(), summed(size, 0, size * kNumel, dtype)));
    at::Tensor full = filled(comm.rank(), 0, size * kNumel, dtype).to(device);
    comm.reduce_scatter(full, "gradients")->wait();
    at::Tensor slice = full.narrow(0, comm.rank() * kNumel, kNumel);
    EXPECT_TRUE(at::equal(slice.cpu(), summed(size, comm.rank() * kNumel, kNumel, dtype)));
    comm.all_gather(full, slice, "parameters")->wait();
    EXPECT_TRUE(at::equal(full.cpu(), summed(size, 0, size * kNumel, dtype)));
    at::Tensor copied = filled(comm.rank(), 3, 77, dtype).to(device);
    comm.broadcast(copied, size - 1, "copy")->wait();
    EXPECT_TRUE(at::equal(copied.cpu(), filled(size - 1, 3, 77, dtype)));
    comm.barrier("next dtype");
  }
}

/// Why there is no device; empty: there is one.
std::string no_device() {
  try {
    return cuda_devices().num_visible > 0 ? "" : "this host has no usable CUDA device";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(GpuTest, NcclCollectives) {
  if (const std::string reason = no_device(); !reason.empty()) GTEST_SKIP() << reason;
  const int num_devices = cuda_devices().num_visible;
  const int size = std::min(num_devices, 4);
  const GroupStore store(c10::make_intrusive<c10d::HashStore>(), "the threads' store");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      set_cuda_device(choose_cuda_device(cuda_devices(), rank, size, /*may_share=*/false));
      auto context = std::make_shared<GroupContext>(store, rank, size, false);
      const auto timeout = std::chrono::seconds(60);
      const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(rank));
      const auto make = [&](const GroupStore& under, FailureHook) {
        return make_nccl_transport(under, rank, size, rank, timeout);
      };
      const auto comm = std::make_shared<TransportCommunicator>(context, timeout, make, device);
      EXPECT_EQ(comm->backend(), "nccl");
      EXPECT_EQ(comm->device(), device);
      check_collectives(*comm, device);
      check_collectives(*comm->duplicate("twin"), device);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// What each rank prints, as a process of its own.
std::vector<std::string> bits_of(int world, testing::Variables variables, bool on_one_device) {
  if (on_one_device) variables["CUDA_VISIBLE_DEVICES"] = "0";
  for (const char* name : {"TESSERA_CUDA_PLUGIN", "HOME"})
    if (const char* value = std::getenv(name)) variables[name] = value;
  const testing::Processes processes = testing::start("bits", world, variables);
  std::vector<std::string> bits;
  for (const auto& process : processes) {
    EXPECT_EQ(process->wait(), 0) << process->output();
    bits.push_back(process->output());
  }
  return bits;
}

void expect_staged_gives_the_bits_of_the_cpu(int world, bool on_one_device) {
  std::vector<std::string> expected = bits_of(world, {{"TEST_BACKEND", "shm"}}, on_one_device);
  const std::vector<std::string> found =
      bits_of(world, {{"TEST_BACKEND", "staged"}, {"TEST_DEVICE", "cuda"}}, on_one_device);
  for (size_t rank = 0; rank < found.size(); ++rank) {
    const std::string& line = expected[rank];
    EXPECT_EQ(found[rank], line.substr(0, line.find(" backend")) + " backend staged\n") << "rank " << rank;
  }
}

TEST(GpuTest, StagedBetweenRanksOfOneDeviceGivesTheBitsOfTheCpu) {
  if (const std::string reason = no_device(); !reason.empty()) GTEST_SKIP() << reason;
  for (const int world : {2, 4}) expect_staged_gives_the_bits_of_the_cpu(world, /*on_one_device=*/true);
}

TEST(GpuTest, StagedBetweenDevicesGivesTheBitsOfTheCpu) {
  if (const std::string reason = no_device(); !reason.empty()) GTEST_SKIP() << reason;
  const int num_devices = cuda_devices().num_visible;
  if (num_devices < 2) GTEST_SKIP() << "this host has one CUDA device";
  expect_staged_gives_the_bits_of_the_cpu(std::min(num_devices, 4), /*on_one_device=*/false);
}

TEST(GpuTest, AKilledRankEndsTheWaitForItsSum) {
  if (const std::string reason = no_device(); !reason.empty()) GTEST_SKIP() << reason;
  testing::Variables variables{
      {"TEST_BACKEND", "staged"}, {"TEST_DEVICE", "cuda"}, {"CUDA_VISIBLE_DEVICES", "0"}};
  if (const char* plugin = std::getenv("TESSERA_CUDA_PLUGIN")) variables["TESSERA_CUDA_PLUGIN"] = plugin;
  const testing::Processes processes = testing::start("device_loop", 2, variables);
  for (const auto& process : processes) ASSERT_TRUE(process->await_output("running")) << process->output();
  processes[1]->kill(SIGKILL);
  EXPECT_EQ(processes[0]->wait(), 3);
  EXPECT_NE(processes[0]->output().find("rank 1 is gone"), std::string::npos) << processes[0]->output();
}

}  // namespace
}  // namespace tessera::comm

// NCCL on real devices, one rank per device, as threads. Skipped without a device.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <thread>

#include "comm/cuda_choice.h"
#include "comm/nccl.h"
#include "comm/nccl_plugin.h"
#include "comm/transport_communicator.h"
#include "core/cuda_plugin.h"
#include "core/error.h"
#include "tests/comm/comm_testing.h"

namespace tessera::comm {
namespace {

using testing::filled;
using testing::summed;

void check_collectives(Communicator& comm, at::Device device) {
  const int size = comm.size();
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
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

TEST(GpuTest, NcclCollectives) {
  int num_devices = 0;
  try {
    num_devices = reinterpret_cast<decltype(&tessera_cuda_num_devices)>(
        cuda_plugin_symbol("tessera_cuda_num_devices"))();
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  if (num_devices == 0) GTEST_SKIP() << "this host has no usable CUDA device";
  const int size = std::min(num_devices, 4);
  const GroupStore store(c10::make_intrusive<c10d::HashStore>(), "the threads' store");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Environment env;
      env.rank = env.local_rank = rank;
      env.world_size = env.local_world_size = size;
      set_cuda_device(choose_cuda_device(cuda_devices(), rank, size, /*may_share=*/false));
      auto context = std::make_shared<GroupContext>(store, rank, size, false);
      const auto timeout = std::chrono::seconds(60);
      const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(rank));
      const auto make = [&](const GroupStore& under, FailureHook) {
        return make_nccl_transport(under, env, rank, timeout);
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

}  // namespace
}  // namespace tessera::comm

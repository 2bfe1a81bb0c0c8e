// Facts of this host, beside what the kernel says elsewhere.
#include "tools/doctor/doctor_facts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <thread>

namespace tessera::tools {
namespace {

TEST(DoctorFacts, OfThisHost) {
  const HostFacts facts = host_facts();
  EXPECT_GE(facts.cores, 1);
  EXPECT_LE(facts.cores, facts.machine_cores);
  EXPECT_GT(facts.free_memory, 0);
  EXPECT_LT(facts.free_memory, facts.memory);
  EXPECT_TRUE(facts.gpus > 0 || !facts.no_gpu.empty());
  EXPECT_THAT(facts.torch, testing::StartsWith("2."));
  EXPECT_THAT(facts.build, testing::MatchesRegex("[0-9.]+ \\([0-9a-f]{8}\\)"));
}

TEST(DoctorFacts, NetworkByRouteAndByName) {
  HostReport host;
  find_network(host, "127.0.0.1", 29500, /*is_cuda=*/false);
  EXPECT_EQ(host.address, "127.0.0.1");
  EXPECT_EQ(host.interface, "lo");
  EXPECT_EQ(host.chosen_by, "route to 127.0.0.1");
  std::ifstream mtu("/sys/class/net/lo/mtu");
  int expected = 0;
  ASSERT_TRUE(mtu >> expected);
  EXPECT_EQ(host.mtu, expected);
  EXPECT_EQ(host.link_bits_per_s, 0);
  ::setenv("GLOO_SOCKET_IFNAME", "lo", 1);
  find_network(host, "192.0.2.1", 29500, /*is_cuda=*/false);
  EXPECT_EQ(host.interface, "lo");
  EXPECT_EQ(host.chosen_by, "GLOO_SOCKET_IFNAME");
  ::setenv("GLOO_SOCKET_IFNAME", "nosuch0", 1);
  HostReport lost;
  find_network(lost, "192.0.2.1", 29500, /*is_cuda=*/false);
  EXPECT_EQ(lost.address, "");
  EXPECT_THAT(lost.chosen_by, testing::HasSubstr("nosuch0"));
  ::unsetenv("GLOO_SOCKET_IFNAME");
}

}  // namespace
}  // namespace tessera::tools

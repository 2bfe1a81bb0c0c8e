// Facts of this host, beside what the kernel says elsewhere.
#include "tools/doctor/doctor_facts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/files/temporary_folder.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

void write(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

TEST(DoctorFacts, MemoryLimitIsTheSmallestAbove) {
  const TemporaryFolder root("tessera_doctor");
  const fs::path groups = root.path() / "sys/fs/cgroup";
  write(root.path() / "proc/self/cgroup", "0::/jobs/mine\n");
  EXPECT_EQ(memory_limit(root.path()), -1);
  write(groups / "jobs/mine/memory.max", "max\n");
  EXPECT_EQ(memory_limit(root.path()), -1);
  write(groups / "jobs/memory.max", "4000000000\n");
  EXPECT_EQ(memory_limit(root.path()), 4000000000);
  write(groups / "jobs/mine/memory.max", "5000000000\n");
  EXPECT_EQ(memory_limit(root.path()), 4000000000);
}

TEST(DoctorFacts, MemoryLimitOfVersion1) {
  const TemporaryFolder root("tessera_doctor");
  const fs::path groups = root.path() / "sys/fs/cgroup/memory";
  write(root.path() / "proc/self/cgroup", "4:cpu,cpuacct:/a\n9:memory:/docker/b\n");
  write(groups / "docker/b/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(memory_limit(root.path()), -1);
  write(groups / "docker/memory.limit_in_bytes", "1000000\n");
  EXPECT_EQ(memory_limit(root.path()), 1000000);
}

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

// available_memory() on kernels' files as they look on a machine, in a container, and under limits.
#include "core/memory/available_memory.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "core/error.h"
#include "core/files/temporary_folder.h"

namespace tessera {
namespace {

class AvailableMemoryTest : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = folder_.path() / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  void machine_has_1000_kib() {
    write("proc/meminfo", "MemTotal:        2000 kB\nMemFree:   10 kB\nMemAvailable:    1000 kB\n");
  }
  int64_t available() const { return available_memory(folder_.path()); }

  TemporaryFolder folder_{"tessera_available"};
};

TEST_F(AvailableMemoryTest, WithoutLimitsIsTheMachines) {
  machine_has_1000_kib();
  EXPECT_EQ(available(), 1'024'000);
  write("proc/self/cgroup", "0::/user.slice\n");
  write("sys/fs/cgroup/user.slice/memory.max", "max\n");
  write("sys/fs/cgroup/user.slice/memory.current", "5000\n");
  EXPECT_EQ(available(), 1'024'000);
}

TEST_F(AvailableMemoryTest, EveryGroupAboveHasALimit) {
  machine_has_1000_kib();
  write("proc/self/cgroup", "0::/a/b\n");
  write("sys/fs/cgroup/a/b/memory.max", "max\n");
  write("sys/fs/cgroup/a/b/memory.current", "5000\n");
  write("sys/fs/cgroup/a/memory.max", "100000\n");
  write("sys/fs/cgroup/a/memory.current", "30000\n");
  EXPECT_EQ(available(), 70'000);
  write("sys/fs/cgroup/a/memory.stat", "anon 1000\ninactive_file 20000\nactive_file 4\n");
  EXPECT_EQ(available(), 90'004) << "pages of files can be dropped, those used lately too";
  write("sys/fs/cgroup/a/memory.current", "130000\n");
  EXPECT_EQ(available(), 0);
}

TEST_F(AvailableMemoryTest, Version1AndAGroupThatAContainerSeesAsTheRoot) {
  machine_has_1000_kib();
  write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/0123\n1:cpuset:/\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "600000\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "200000\n");
  write("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 50000\n");
  EXPECT_EQ(available(), 450'000);
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");  // none
  EXPECT_EQ(available(), 1'024'000);
}

TEST_F(AvailableMemoryTest, FilesUsedLatelyAreRoomToo) {
  write("proc/meminfo", "MemAvailable: 8388608 kB\n");
  write("proc/self/cgroup", "0::/a\n");
  constexpr int64_t kGiB = int64_t{1} << 30;
  write("sys/fs/cgroup/a/memory.max", std::to_string(4 * kGiB));
  write("sys/fs/cgroup/a/memory.current", std::to_string(3 * kGiB));
  write("sys/fs/cgroup/a/memory.stat", "shmem 400\nactive_file 1073741824\ninactive_file 536870912\n");
  EXPECT_EQ(available(), 5 * kGiB / 2);
}

TEST_F(AvailableMemoryTest, TheLimitIsTheSmallestAbove) {
  const auto limit = [&] { return memory_limit(folder_.path()); };
  write("proc/self/cgroup", "0::/jobs/mine\n");
  EXPECT_EQ(limit(), -1);
  write("sys/fs/cgroup/jobs/mine/memory.max", "max\n");
  EXPECT_EQ(limit(), -1);
  write("sys/fs/cgroup/jobs/memory.max", "4000000000\n");
  EXPECT_EQ(limit(), 4000000000);
  write("sys/fs/cgroup/jobs/mine/memory.max", "5000000000\n");
  EXPECT_EQ(limit(), 4000000000);
}

TEST_F(AvailableMemoryTest, TheLimitOfVersion1) {
  const auto limit = [&] { return memory_limit(folder_.path()); };
  write("proc/self/cgroup", "4:cpu,cpuacct:/a\n9:memory:/docker/b\n");
  write("sys/fs/cgroup/memory/docker/b/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(limit(), -1);
  write("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "1000000\n");
  EXPECT_EQ(limit(), 1000000);
}

TEST_F(AvailableMemoryTest, OfThisMachine) {
  EXPECT_GT(available_memory(), 0);
  EXPECT_THROW(available(), Error) << "no file says it";
}

}  // namespace
}  // namespace tessera

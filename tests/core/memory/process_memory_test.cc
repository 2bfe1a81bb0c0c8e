#include "core/memory/process_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <chrono>
#include <thread>

#include "core/async_io/spill_file.h"
#include "core/files/temporary_folder.h"

namespace tessera {
namespace {

TEST(PeakOwnBytes, IsMeasuredAtLeastOnceHoweverShortTheBodyIs) {
  for (int i = 0; i < 20; ++i) EXPECT_GT(peak_own_bytes([] {}), 0);
}

TEST(PeakOwnBytes, SeesMemoryThatIsGivenBackBeforeTheEnd) {
  constexpr size_t kBytes = 64 << 20;
  const double before = own_bytes();
  const double peak = peak_own_bytes([] {
    void* const block =
        ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    ASSERT_NE(block, MAP_FAILED);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    ::munmap(block, kBytes);
  });
  EXPECT_GT(peak, before + 0.9 * kBytes);
  EXPECT_LT(own_bytes(), before + 0.5 * kBytes);
}

TEST(PeakBytes, IsThatOfTheWholeLifeAndKnowsFileMappings) {
  constexpr size_t kBytes = 64 << 20;
  void* const block =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  ASSERT_NE(block, MAP_FAILED);
  const double with_block = own_bytes();
  ::munmap(block, kBytes);
  EXPECT_GE(peak_bytes(), with_block);
  EXPECT_NEAR(resident_share(1), own_bytes(), 4 << 20);
  EXPECT_GT(file_mapping_bytes(), 0) << "this program's own code";
  EXPECT_LE(peak_bytes(), peak_resident_bytes() + (1 << 20));
}

TEST(UnnamedFileBytes, AreThoseThatTheDiskHas) {
  const TemporaryFolder folder("tessera_unnamed"), other("tessera_unnamed");
  EXPECT_EQ(unnamed_file_bytes(folder.path().string()), 0);
  {
    const SpillFile spill({.directory = folder.path().string(), .bytes = 3 << 20});
    EXPECT_GE(unnamed_file_bytes(folder.path().string()), 3 << 20);
    EXPECT_LE(unnamed_file_bytes(folder.path().string()), (3 << 20) + (64 << 10));
    EXPECT_EQ(unnamed_file_bytes(other.path().string()), 0);
  }
  EXPECT_EQ(unnamed_file_bytes(folder.path().string()), 0);
}

}  // namespace
}  // namespace tessera

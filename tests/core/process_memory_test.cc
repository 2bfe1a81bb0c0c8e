#include "core/process_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <chrono>
#include <thread>

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

}  // namespace
}  // namespace tessera

// What is noted of an allocation that fails, and available_to_process().
#include "core/memory/allocation_failure.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <thread>

#include "core/memory/available_memory.h"

namespace tessera {
namespace {

TEST(AllocationFailure, IsOfTheInnermostScopes) {
  const std::string outer_unit = "unit 0 (a … b)", inner_unit = "unit 1 (c)";
  {
    const MemoryForUnit outer(outer_unit);
    const MemoryFor use(MemoryUse::kMaster);
    {
      const MemoryForUnit inner(inner_unit);
      note_allocation_failure(30, 20, 100);
    }
    const auto failure = take_allocation_failure();
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->bytes, 30);
    EXPECT_EQ(failure->available, 20);
    EXPECT_EQ(failure->total, 100);
    EXPECT_EQ(failure->use, MemoryUse::kMaster);
    EXPECT_EQ(failure->unit, inner_unit);
    note_allocation_failure(5, std::nullopt);
    EXPECT_EQ(take_allocation_failure()->unit, outer_unit);
  }
  note_allocation_failure(7, std::nullopt);
  const auto outside = take_allocation_failure();
  EXPECT_EQ(outside->bytes, 7);
  EXPECT_FALSE(outside->available || outside->total || outside->use);
  EXPECT_EQ(outside->unit, "");
  EXPECT_FALSE(take_allocation_failure()) << "it was taken";
}

TEST(AllocationFailure, OfThisThreadOrElseOfAnother) {
  std::thread([] { note_allocation_failure(1, std::nullopt); }).join();
  EXPECT_EQ(take_allocation_failure()->bytes, 1) << "as of autograd's threads";
  note_allocation_failure(2, std::nullopt);
  std::thread([] { note_allocation_failure(3, std::nullopt); }).join();
  EXPECT_EQ(take_allocation_failure()->bytes, 2);
  EXPECT_FALSE(take_allocation_failure());

  note_allocation_failure(4, std::nullopt);  // the model's own, which it has caught
  std::thread([] {
    const std::string unit = "unit 0 (a)";
    const MemoryForUnit for_unit(unit);
    note_allocation_failure(5, std::nullopt);
  }).join();
  EXPECT_EQ(take_allocation_failure()->bytes, 5) << "a gather in the backward of a device";
}

TEST(AllocationFailure, OfAUnitIsNotReplacedByWhatFollowsFromIt) {
  const std::string unit = "unit 0 (a)";
  note_allocation_failure(1, std::nullopt);
  {
    const MemoryForUnit for_unit(unit);
    note_allocation_failure(2, std::nullopt);
  }
  note_allocation_failure(3, std::nullopt);
  EXPECT_EQ(take_allocation_failure()->bytes, 2);
}

/// Ends the process with 0 if 64 MiB of address space below the limit are what is available.
void check_available_below_a_limit() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t limit = static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE)) + (64 << 20);
  const rlimit both{limit, limit};
  if (::setrlimit(RLIMIT_AS, &both) != 0) std::_Exit(2);
  const int64_t bytes = available_to_process();
  std::_Exit(bytes > (32 << 20) && bytes <= (64 << 20) ? 0 : 1);
}

TEST(AvailableToProcess, IsNoMoreThanTheAddressSpaceThatIsLeft) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer needs address space of its own";
#endif
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_LE(available_to_process(), available_memory() + (int64_t{1} << 30)) << "about";
  EXPECT_EXIT(check_available_below_a_limit(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace tessera

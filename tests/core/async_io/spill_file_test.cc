// What a SpillFile holds, beside a plain array in memory.
#include "core/async_io/spill_file.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "core/files/temporary_folder.h"
#include "core/str.h"
#include "tests/core/async_io/spill_file_testing.h"

namespace tessera::testing {
namespace {

TESSERA_BOTH_WAYS(SpillFileTest);

/// Reads and writes blocks `first` to `end` of the file in random parts, several at a time, and holds what it
/// reads to `model`, an array that has seen the same writes.
class RandomTransfers {
 public:
  RandomTransfers(SpillFile& file, const AlignedMemory& model, int64_t first, int64_t end, uint64_t seed)
      : file_(file), model_(model), first_(first), end_(end), random_(seed) {}

  void run(int num_transfers) {
    for (int i = 0; i < num_transfers; ++i) {
      start();
      if (under_way_.size() > 6) finish(random_() % under_way_.size());
    }
    while (!under_way_.empty()) finish(under_way_.size() - 1);
  }

  int64_t bytes_read = 0, bytes_written = 0, num_wrong = 0;

 private:
  struct UnderWay {
    bool is_write;
    int64_t offset, bytes;
    AlignedMemory memory;
    SpillFile::Transfer transfer;
  };

  int64_t below(int64_t limit) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(limit)); }

  void start() {
    // As many short ones as long ones: the length is 2^k at most.
    const int64_t most = std::min<int64_t>(end_ - first_, int64_t{1} << below(10));
    const int64_t blocks = 1 + below(most), from = first_ + below(end_ - first_ - blocks + 1);
    const int64_t offset = from * kBlock, bytes = blocks * kBlock;
    const bool is_write = random_() % 2 == 0;
    for (size_t i = under_way_.size(); i-- > 0;)
      if (offset < under_way_[i].offset + under_way_[i].bytes && under_way_[i].offset < offset + bytes)
        finish(i);
    under_way_.push_back({is_write, offset, bytes, AlignedMemory(bytes, 0x5a), 0});
    UnderWay& last = under_way_.back();
    if (is_write) {
      fill_random(last.memory.span(), random_);
      std::ranges::copy(last.memory.span(), model_.part(offset, bytes).begin());
      last.transfer = file_.write(offset, last.memory.span());
    } else {
      last.transfer = file_.read(offset, last.memory.span());
    }
  }

  void finish(size_t i) {
    UnderWay& ended = under_way_[i];
    file_.wait(ended.transfer);
    num_wrong += !file_.done(ended.transfer);
    num_wrong += !std::ranges::equal(ended.memory.span(), model_.part(ended.offset, ended.bytes));
    (ended.is_write ? bytes_written : bytes_read) += ended.bytes;
    std::swap(ended, under_way_.back());
    under_way_.pop_back();
  }

  SpillFile& file_;
  const AlignedMemory& model_;
  const int64_t first_, end_;
  std::mt19937_64 random_;
  std::vector<UnderWay> under_way_;
};

void random_transfers(const SpillFileOptions& options, int num_threads, int num_transfers) {
  const int64_t num_blocks = options.bytes / kBlock;
  SpillFile file(options);
  const AlignedMemory model(options.bytes);
  std::atomic<int64_t> bytes_read = 0, bytes_written = 0, num_wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < num_threads; ++t)
      threads.emplace_back([&, t] {
        RandomTransfers mine(file, model, num_blocks * t / num_threads, num_blocks * (t + 1) / num_threads,
                             static_cast<uint64_t>(100 * num_threads + t));
        mine.run(num_transfers);
        bytes_read += mine.bytes_read;
        bytes_written += mine.bytes_written;
        num_wrong += mine.num_wrong;
      });
  }
  EXPECT_EQ(num_wrong, 0);
  EXPECT_GT(bytes_read, options.bytes / 4);
  EXPECT_EQ(file.bytes_read(), bytes_read);
  EXPECT_EQ(file.bytes_written(), bytes_written);
  const AlignedMemory whole(options.bytes, 0x5a);
  file.wait(file.read(0, whole.span()));
  EXPECT_TRUE(whole == model);
}

TEST_P(SpillFileTest, HoldsWhatWasWritten) {
  const TemporaryFolder folder("spill");
  for (const int num_threads : {1, 2, 3, 4}) {
    SCOPED_TRACE(str(num_threads, " threads"));
    random_transfers(options(folder.path(), 16 << 20), num_threads, 60);
  }
}

TEST_P(SpillFileTest, HoldsWhatWasWrittenByFewThreads) {
  const TemporaryFolder folder("spill");
  for (const int num : {1, 3}) {
    SCOPED_TRACE(str(num, " threads of its own"));
    SpillFileOptions few = options(folder.path(), 4 << 20);
    few.num_threads = num;
    few.piece_bytes = 5 * kBlock;
    random_transfers(few, 3, 60);
  }
}

TEST_P(SpillFileTest, ReadsZerosWhereNothingWasWritten) {
  const TemporaryFolder folder("spill");
  SpillFile file(options(folder.path(), (1 << 20) - 1));  // rounded up
  const AlignedMemory ones(kBlock, 1), read(1 << 20, 0x5a), expected(1 << 20);
  file.wait(file.write(7 * kBlock, ones.span()));
  std::ranges::copy(ones.span(), expected.part(7 * kBlock, kBlock).begin());
  file.wait(file.read(0, read.span()));
  EXPECT_TRUE(read == expected);
}

// A transfer belongs to no thread: the one that started it may have ended, and several may wait.
TEST_P(SpillFileTest, AnyThreadMayWait) {
  const TemporaryFolder folder("spill");
  constexpr int64_t kBytes = 24 << 20;
  SpillFile file(options(folder.path(), kBytes));
  const AlignedMemory written(kBytes), read(kBytes);
  std::mt19937_64 random(1);
  fill_random(written.span(), random);
  SpillFile::Transfer transfer = 0;
  std::thread([&] { transfer = file.write(0, written.span()); }).join();
  {
    std::vector<std::jthread> waiting;
    for (int i = 0; i < 4; ++i) waiting.emplace_back([&] { file.wait(transfer); });
  }
  EXPECT_TRUE(file.done(transfer));
  std::thread([&] { transfer = file.read(0, read.span()); }).join();
  while (!file.done(transfer)) std::this_thread::yield();  // goes on while nobody waits
  EXPECT_TRUE(read == written);
  file.wait(transfer);
}

TEST_P(SpillFileTest, NothingToDoIsDone) {
  const TemporaryFolder folder("spill");
  SpillFile empty(options(folder.path(), 0));
  EXPECT_EQ(empty.read(0, {}), 0);
  EXPECT_EQ(empty.write(0, {}), 0);
  EXPECT_TRUE(empty.done(0));
  empty.wait(0);
}

TEST_P(SpillFileTest, RefusesWhatIsNotAlignedOrNotInside) {
  const TemporaryFolder folder("spill");
  SpillFile file(options(folder.path(), 4 * kBlock));
  const AlignedMemory memory(8 * kBlock);
  EXPECT_THROW(file.read(512, memory.part(0, kBlock)), std::logic_error);
  EXPECT_THROW(file.read(0, memory.part(0, 512)), std::logic_error);
  EXPECT_THROW(file.write(0, memory.part(512, kBlock)), std::logic_error);
  EXPECT_THROW(file.write(4 * kBlock, memory.part(0, kBlock)), std::logic_error);
  EXPECT_THROW(file.read(-kBlock, memory.part(0, kBlock)), std::logic_error);
  EXPECT_THROW(file.read(0, memory.span()), std::logic_error);
  EXPECT_THROW(file.wait(1), std::logic_error);
  file.wait(file.read(3 * kBlock, memory.part(0, kBlock)));
}

// The memory is the caller's again: AddressSanitizer would not see the kernel write to it.
TEST_P(SpillFileTest, EndsWithTransfersUnderWay) {
  const TemporaryFolder folder("spill");
  constexpr int64_t kBytes = 32 << 20;
  const AlignedMemory ones(kBytes, 1), memory(kBytes), twos(kBytes, 2);
  for (int i = 0; i < 5; ++i) {
    SpillFileOptions small = options(folder.path(), kBytes);
    small.num_threads = i < 3 ? 32 : 2;
    small.piece_bytes = 1 << 20;
    {
      SpillFile file(small);
      file.wait(file.write(0, ones.span()));
      file.read(0, memory.span());
      std::this_thread::sleep_for(std::chrono::milliseconds(2 * i));
    }
    std::ranges::copy(twos.span(), memory.span().begin());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_TRUE(memory == twos);
  }
  EXPECT_TRUE(is_empty(folder.path()));
  EXPECT_EQ(descriptor_in(folder.path()), -1);
}

TEST_P(SpillFileTest, ItsFileIsPrivateReservedAndDirect) {
  const TemporaryFolder folder("spill");
  const auto directory = folder.path() / "a" / "b";
  SpillFile file(options(directory, 8 << 20));
  EXPECT_TRUE(is_empty(directory));
  const int descriptor = descriptor_in(directory);
  ASSERT_GE(descriptor, 0);
  struct stat status{};
  ASSERT_EQ(::fstat(descriptor, &status), 0);
  EXPECT_EQ(status.st_size, 8 << 20);
  EXPECT_GE(status.st_blocks * 512, 8 << 20);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_EQ(status.st_nlink, 0u);
  EXPECT_EQ(::fcntl(descriptor, F_GETFD), FD_CLOEXEC);
  EXPECT_EQ((::fcntl(descriptor, F_GETFL) & O_DIRECT) != 0, file.direct());
  EXPECT_LE(file.direct(), GetParam());
}

TEST_P(SpillFileTest, LeavesNothingInThePageCache) {
  const TemporaryFolder folder("spill");
  constexpr int64_t kBytes = 16 << 20;
  SpillFile file(options(folder.path(), kBytes));
  const AlignedMemory memory(kBytes, 7);
  const int descriptor = descriptor_in(folder.path());
  ASSERT_GE(descriptor, 0);
  void* const mapped = ::mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, descriptor, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const auto num_cached = [&] {
    std::vector<unsigned char> pages(kBytes / kBlock);
    EXPECT_EQ(::mincore(mapped, kBytes, pages.data()), 0);
    return std::ranges::count_if(pages, [](unsigned char page) { return (page & 1) != 0; });
  };
  ASSERT_EQ(::pread(descriptor, memory.span().data(), kBlock, 0), kBlock);
  if (!file.direct() && num_cached() == 0) GTEST_SKIP() << "mincore() tells nothing about this file system";
  // Whole, and in parts of an odd size.
  for (const int64_t part_bytes : {kBytes, 37 * kBlock})
    for (const bool is_write : {true, false}) {
      std::vector<SpillFile::Transfer> transfers;
      for (int64_t at = 0; at < kBytes; at += part_bytes) {
        const auto part = memory.part(at, std::min(part_bytes, kBytes - at));
        transfers.push_back(is_write ? file.write(at, part) : file.read(at, part));
      }
      for (const SpillFile::Transfer transfer : transfers) file.wait(transfer);
      EXPECT_EQ(num_cached(), 0) << (is_write ? "written" : "read") << " by " << part_bytes;
    }
  EXPECT_EQ(::munmap(mapped, kBytes), 0);
}

}  // namespace
}  // namespace tessera::testing

// Each file operation of a save fails once, on each rank; real full disks and read-only directories.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>

#include "checkpoint/read/reader.h"
#include "checkpoint/sharded/catalog.h"
#include "core/str.h"
#include "tests/checkpoint/checkpoint_testing.h"
#include "tests/support/child_process.h"

namespace tessera::checkpoint::testing {
namespace {

namespace fs = std::filesystem;
using tessera::testing::in_child;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

std::vector<std::string> save_with_fault(const SampleModel& model, const fs::path& directory,
                                         const std::string& tag, int faulty_rank, int fail_at, bool& failed) {
  int num_done = 0;
  return save_all(model, directory, tag, [&](int rank) {
    DiskOptions options;
    if (rank == faulty_rank)
      options.probe = [&](std::string_view operation, const fs::path& path) {
        if (++num_done != fail_at) return;
        failed = true;
        throw DiskError("cannot ", operation, " ", path, ": No space left on device");
      };
    return options;
  });
}

void fail_everywhere(int world, int faulty_rank, const std::string& tag) {
  const SampleModel before = sample_model(world, 1), after = sample_model(world, 2);
  int num_failures = 0;
  for (int fail_at = 1;; ++fail_at) {
    SCOPED_TRACE(
        str("world ", world, ", rank ", faulty_rank, ", tag ", tag, ", operation ", fail_at, " fails"));
    const MemoryFolder folder;
    save_all(before, folder.path(), "a");
    bool failed = false;
    const std::vector<std::string> errors =
        save_with_fault(after, folder.path(), tag, faulty_rank, fail_at, failed);
    if (errors[0].empty()) {  // all operations went well, or the last one: removing the checkpoint replaced
      EXPECT_THAT(errors, Each(IsEmpty()));
      EXPECT_EQ(after.difference(Checkpoint::open(folder.path())), "");
      if (!failed) break;
      EXPECT_EQ(tag, "a");
      continue;
    }
    ++num_failures;
    const std::string rank = str("rank ", faulty_rank, ": ");
    EXPECT_THAT(errors,
                Each(AllOf(StartsWith(str("cannot save checkpoint ", folder.path() / tag, ": ", rank)),
                           HasSubstr("No space left"))));
    EXPECT_THAT(names_in(folder.path()), ElementsAre("a", "latest"));
    EXPECT_EQ(before.difference(Checkpoint::open(folder.path())), "");
    EXPECT_THAT(verify(folder.path(), "").problems, IsEmpty());
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_GE(num_failures, 10);
}

class FaultOf : public ::testing::TestWithParam<int> {};  // ranks

TEST_P(FaultOf, AnyFailedOperationEndsTheSaveOnAllRanks) {
  for (int rank = 0; rank < GetParam(); ++rank)
    for (const char* tag : {"a", "b"}) fail_everywhere(GetParam(), rank, tag);
}

INSTANTIATE_TEST_SUITE_P(Worlds, FaultOf, ::testing::Values(1, 2, 3),
                         [](const auto& info) { return str("World", info.param); });

TEST(Fault, LeftoverOfAReplacedCheckpointIsAWarning) {
  const MemoryFolder folder;
  const SampleModel before = sample_model(1, 1), after = sample_model(1, 2);
  save_all(before, folder.path(), "a");
  std::string warning;
  const auto errors = run_ranks(1, [&](int rank, const Exchange& exchange) {
    SaveRequest request = after.request(folder.path(), "a", rank);
    bool exchanged = false;
    request.disk.probe = [exchanged](std::string_view operation, const fs::path&) mutable {
      exchanged = exchanged || operation == "exchange";
      if (exchanged && operation == "remove") throw DiskError("cannot remove x: Input/output error");
    };
    warning = save(request, exchange).warning;
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(warning, HasSubstr("cannot remove x: Input/output error"));
  EXPECT_EQ(after.difference(Checkpoint::open(folder.path())), "");
}

TEST(Fault, AnExchangeThatFailsLeavesNothing) {
  const SampleModel before = sample_model(1, 1), after = sample_model(1, 2);
  for (int failing : {1, 2}) {
    const MemoryFolder folder;
    save_all(before, folder.path(), "a");
    int num_exchanges = 0;
    const Exchange exchange = [&](const std::string& mine) {
      if (++num_exchanges == failing) throw CommError("rank 1 has left");
      return std::vector{mine};
    };
    EXPECT_THROW(save(after.request(folder.path(), "b", 0), exchange), CommError);
    EXPECT_THAT(names_in(folder.path()), ElementsAre("a", "latest"));
  }
}

SampleModel big_model(uint64_t seed) {
  return {{{.name = "big",
            .shape = {300'000},
            .dtype = DType::kFloat32,
            .trainable = true,
            .group = 0,
            .aliases = {}}},
          {.world_size = 2},
          seed};
}

constexpr const char* kNotPossible = "not possible here";

TEST(Fault, AFullDisk) {
  const MemoryFolder folder;
  const std::string result = in_child([&]() -> std::string {
    if (::geteuid() != 0 && ::unshare(CLONE_NEWUSER) != 0) return kNotPossible;
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
      return kNotPossible;
    if (::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=6m") != 0)
      return kNotPossible;  // one checkpoint takes 3.6 MB
    const SampleModel before = big_model(1), after = big_model(2);
    std::string text = join(save_all(before, folder.path(), "a"), "|") + "\n";
    text += join(save_all(after, folder.path(), "a"), "|") + "\n";
    text += str(before.difference(Checkpoint::open(folder.path())), "\n", join(names_in(folder.path()), " "));
    return text;
  });
  if (result == kNotPossible) GTEST_SKIP() << "mounting a small tmpfs is not allowed here";
  EXPECT_THAT(result, AllOf(StartsWith("|\ncannot save checkpoint "), HasSubstr(": No space left on device"),
                            HasSubstr("\n\na latest")))
      << result;
}

TEST(Fault, AFileSizeLimit) {
  const MemoryFolder folder;
  const SampleModel before = big_model(1), after = big_model(2);
  save_all(before, folder.path(), "a");
  const std::string result = in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1'000'000, 1'000'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    return join(save_all(after, folder.path(), "b"), "|");
  });
  EXPECT_THAT(result,
              AllOf(HasSubstr("rank 0: cannot "), HasSubstr("rank 1: cannot "), HasSubstr("File too large")))
      << result;
  EXPECT_THAT(names_in(folder.path()), ElementsAre("a", "latest"));
  EXPECT_EQ(before.difference(Checkpoint::open(folder.path())), "");
}

// HDF5 keeps a file open that it could not write, and its exit handler would write to it again.
TEST(Fault, AProcessWithAFileSizeLimitEndsByItself) {
  const MemoryFolder folder;
  const SampleModel model = sample_model(1, 1);
  const auto save_and_exit = [&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1000, 1000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    std::exit(save_all(model, folder.path(), "a").front().empty() ? 1 : 0);
  };
  EXPECT_EXIT(save_and_exit(), ::testing::ExitedWithCode(0), "");
}

TEST(Fault, AReadOnlyDirectory) {
  const MemoryFolder folder;
  const fs::path directory = folder.path() / "shared";
  const SampleModel before = sample_model(2, 1), after = sample_model(2, 2);
  save_all(before, directory, "a");
  fs::permissions(folder.path(), fs::perms::all);
  fs::permissions(directory, fs::perms::owner_read | fs::perms::owner_exec | fs::perms::others_read |
                                 fs::perms::others_exec);
  const std::string result = in_child([&]() -> std::string {
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 && ::setresuid(kNobody, kNobody, kNobody) != 0)
      return kNotPossible;  // root writes anywhere
    return join(save_all(after, directory, "b"), "|");
  });
  fs::permissions(directory, fs::perms::owner_all);
  if (result == kNotPossible) GTEST_SKIP() << "root cannot become another user here";
  EXPECT_THAT(result, AllOf(HasSubstr("rank 0: cannot create directory "), HasSubstr("Permission denied")))
      << result;
  EXPECT_THAT(names_in(directory), ElementsAre("a", "latest"));
  EXPECT_EQ(before.difference(Checkpoint::open(directory)), "");
}

}  // namespace
}  // namespace tessera::checkpoint::testing

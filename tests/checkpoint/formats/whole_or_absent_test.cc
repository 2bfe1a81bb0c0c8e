// A model file is replaced atomically: after any failure, its name has the whole old model or the whole new
// one.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>

#include <functional>
#include <set>

#include "checkpoint/checkpoint_error.h"
#include "core/files/file_descriptor.h"
#include "core/str.h"
#include "tests/checkpoint/formats/formats_testing.h"
#include "tests/support/child_process.h"

namespace tessera::checkpoint {
namespace {

using tessera::testing::error_of;
using tessera::testing::in_child;
using tessera::testing::start_child;
using tessera::testing::status_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

constexpr uint64_t kNumWriters = 8;

struct Case {
  const char* name;
  ModelFormat format;
  int64_t max_shard_bytes;
};

void PrintTo(const Case& which, std::ostream* out) { *out << which.name; }

class WholeOrAbsent : public ::testing::TestWithParam<Case> {
 protected:
  ModelWriterOptions options() const {
    return {.format = GetParam().format,
            .path = folder_ / "out",
            .tensors = small_model(),
            .max_shard_bytes = GetParam().max_shard_bytes};
  }

  std::string written(uint64_t seed) {
    write_model(Disk(), options(), seed);
    return content_of(folder_ / "out");
  }

  /// Calls `at` with the number and name of each operation of a write.
  void write_with(const std::function<void(size_t number, std::string_view name)>& at, uint64_t seed) {
    size_t number = 0;
    const Disk disk({.sync = true, .probe = [&](std::string_view name, const auto&) { at(number++, name); }});
    write_model(disk, options(), seed);
  }
  size_t num_operations() {
    size_t number = 0;
    write_with([&](size_t, auto) { ++number; }, 1);
    return number;
  }

  TestFolder folder_;
};

TEST_P(WholeOrAbsent, EachOperationFails) {
  const size_t count = num_operations();
  ASSERT_GT(count, 15u);
  const std::string new_model = written(2);
  for (const bool exists : {false, true})
    for (size_t fatal = 0; fatal < count; ++fatal) {
      std::filesystem::remove_all(folder_ / "out");
      const std::string old_model = exists ? written(1) : "";
      std::string failed;
      const auto fail = [&](size_t number, std::string_view name) {
        if (number != fatal) return;
        failed = name;
        throw DiskError("No space left on device");
      };
      SCOPED_TRACE(fatal);
      try {
        write_with(fail, 2);
        ASSERT_EQ(failed, "remove") << "only tidying up may fail unheard";
        EXPECT_TRUE(content_of(folder_ / "out") == new_model);
      } catch (const DiskError& error) {
        EXPECT_THAT(error.what(), HasSubstr("No space left"));
        const std::string content = content_of(folder_ / "out");
        EXPECT_TRUE(content == old_model || content == new_model) << failed;
      }
      std::vector<std::string> left;
      if (std::filesystem::exists(folder_ / "out")) left.emplace_back("out");
      EXPECT_EQ(folder_.names(), left) << failed;
    }
}

TEST_P(WholeOrAbsent, KilledAfterEachOperation) {
  const std::string new_model = written(2);
  for (size_t fatal = 0, count = num_operations(); fatal < count; ++fatal) {
    SCOPED_TRACE(fatal);
    const std::string old_model = written(1);
    const auto die = [&](size_t number, auto) {
      if (number == fatal) ::kill(::getpid(), SIGKILL);
    };
    ASSERT_TRUE(WIFSIGNALED(status_of(start_child([&] { write_with(die, 2); }))));
    const std::string content = content_of(folder_ / "out");
    EXPECT_TRUE(content == old_model || content == new_model);
    EXPECT_TRUE(written(2) == new_model);
    EXPECT_THAT(folder_.names(), ElementsAre("out")) << "what the dead have left is removed";
  }
}

TEST_P(WholeOrAbsent, AbandonedWritersLeaveNothing) {
  const Disk disk;
  open_model_writer(disk, options());
  EXPECT_TRUE(folder_.names().empty());
}

TEST_P(WholeOrAbsent, AFileThatCannotGrow) {
  const std::string old_model = written(1);
  const std::string outcome = in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{200, 200};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    return error_of<Error>([&] { written(2); });
  });
  EXPECT_THAT(outcome, HasSubstr("File too large: this process may write files of at most 200 bytes"));
  EXPECT_TRUE(content_of(folder_ / "out") == old_model);
  EXPECT_THAT(folder_.names(), ElementsAre("out"));
}

TEST_P(WholeOrAbsent, WhatOtherProcessesWriteStays) {
  const auto others = {"out.tmp-0123456789abcdef", "out.tmp-0123456789abcde", "out.tmp-0123456789abcdeg",
                       "another.tmp-0123456789abcdef"};
  for (const std::string name : others) write_text(folder_ / name, "x");
  {
    const FileDescriptor held(
        ::open((folder_ / "out.tmp-0123456789abcdef").c_str(), O_RDONLY));  // as its writer does
    ASSERT_EQ(::flock(held.get(), LOCK_EX), 0);
    written(1);
    EXPECT_THAT(folder_.names(),
                UnorderedElementsAre("out", "out.tmp-0123456789abcdef", "out.tmp-0123456789abcde",
                                     "out.tmp-0123456789abcdeg", "another.tmp-0123456789abcdef"));
  }
  written(1);
  EXPECT_THAT(folder_.names(),
              UnorderedElementsAre("out", "out.tmp-0123456789abcde", "out.tmp-0123456789abcdeg",
                                   "another.tmp-0123456789abcdef"));
}

// Two processes that write one name at once: each has its own temporary file, and the last rename wins.
TEST_P(WholeOrAbsent, TwoWritersAtOnce) {
  const std::string first_model = written(1), second_model = written(2);
  const Disk disk;
  const auto first = open_model_writer(disk, options()), second = open_model_writer(disk, options());
  for (const auto& [writer, seed] : {std::pair(first.get(), 1), std::pair(second.get(), 2)})
    writer->append(bytes_of(writer->tensors(), static_cast<uint64_t>(seed)));
  second->finish();
  EXPECT_TRUE(content_of(folder_ / "out") == second_model);
  first->finish();
  EXPECT_TRUE(content_of(folder_ / "out") == first_model);
}

/// Eight processes write models of their own again and again. Each ends well, whatever the others do.
void write_at_once(const ModelWriterOptions& options) {
  std::vector<pid_t> children;
  for (uint64_t seed = 0; seed < kNumWriters; ++seed)
    children.push_back(start_child([&] {
      for (int time = 0; time < 20; ++time) write_model(Disk({.sync = false, .probe = {}}), options, seed);
    }));
  for (const pid_t child : children) EXPECT_EQ(status_of(child), 0);
}

TEST_P(WholeOrAbsent, EightWritersAgainAndAgain) {
  std::set<std::string> models;
  for (uint64_t seed = 0; seed < kNumWriters; ++seed) models.insert(written(seed));
  std::filesystem::remove_all(folder_ / "out");
  write_at_once(options());
  EXPECT_TRUE(models.contains(content_of(folder_ / "out")));
  EXPECT_THAT(folder_.names(), ElementsAre("out"));
}

ModelWriterOptions shards_in(const std::filesystem::path& path, int64_t max_shard_bytes) {
  return {.format = ModelFormat::kSafetensors,
          .path = path,
          .tensors = small_model(),
          .max_shard_bytes = max_shard_bytes};
}

// Files of the user's own are linked into the new folder, by each writer.
TEST(ShardFolder, KeepsOtherFilesThroughEightWriters) {
  TestFolder folder;
  std::filesystem::create_directory(folder / "out");
  for (int i = 0; i < 50; ++i) write_text(folder / str("out/mine_", i), str(i));
  write_at_once(shards_in(folder / "out", 150));
  for (int i = 0; i < 50; ++i) EXPECT_EQ(read_text(folder / str("out/mine_", i)), str(i));
}

// A symbolic link at a predicted temporary name. Names cannot be predicted, and links are not followed.
TEST_P(WholeOrAbsent, NothingIsWrittenThroughALink) {
  write_text(folder_ / "victim", "precious");
  std::vector<std::string> names;
  for (size_t i = 0; i < 3; ++i) {
    const auto note = [&](std::string_view operation, const std::filesystem::path& path) {
      if (operation == "create" && names.size() == i)
        names.push_back(path.lexically_relative(folder_.path()).string());
    };
    write_model(Disk({.sync = true, .probe = note}), options(), 1);
    if (std::filesystem::path(names.back()).has_parent_path()) continue;  // shards lie in a temporary folder
    std::filesystem::create_symlink("victim", folder_ / names.back());
    EXPECT_THROW(Disk().create(folder_ / names.back()), DiskError);
  }
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), 3u) << "another one each time";
  EXPECT_EQ(read_text(folder_ / "victim"), "precious");
}

// A zombie process: kill(pid, 0) reports it as alive.
TEST_P(WholeOrAbsent, WhatAZombieHasLeftIsRemoved) {
  const pid_t child = start_child([&] {
    const Disk disk;
    const auto writer = open_model_writer(disk, options());
    ::kill(::getpid(), SIGKILL);
  });
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_THAT(folder_.names(), ElementsAre(StartsWith("out.tmp-")));
  written(1);
  EXPECT_THAT(folder_.names(), ElementsAre("out"));
  status_of(child);
}

TEST_P(WholeOrAbsent, AFolderThatIsNotThere) {
  ModelWriterOptions elsewhere = options();
  elsewhere.path = folder_ / "file" / "out";
  write_text(folder_ / "file", "x");
  const Disk disk;
  EXPECT_THROW(open_model_writer(disk, elsewhere), Error);
  EXPECT_THAT(folder_.names(), UnorderedElementsAre("file"));
}

INSTANTIATE_TEST_SUITE_P(Formats, WholeOrAbsent,
                         ::testing::Values(Case{"safetensors", ModelFormat::kSafetensors, 0},
                                           Case{"shards", ModelFormat::kSafetensors, 150},
                                           Case{"pt", ModelFormat::kTorch, 0},
                                           Case{"h5", ModelFormat::kHdf5, 0}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(ShardFolder, ThroughASymbolicLink) {
  TestFolder folder;
  std::filesystem::create_directory(folder / "real");
  write_text(folder / "real/config.json", "{}");
  std::filesystem::create_directory_symlink("real", folder / "link");
  write_model(Disk(), shards_in(folder / "link", 1'000'000), 1);
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_TRUE(std::filesystem::exists(folder / "real/model.safetensors"));
  EXPECT_EQ(read_text(folder / "real/config.json"), "{}");
  EXPECT_THAT(folder.names(), ElementsAre("link", "real"));
}

TEST(ShardFolder, WithAFinalSlash) {
  TestFolder folder;
  for (int i = 0; i < 2; ++i) write_model(Disk(), shards_in(folder / "out/", 1'000'000), 1);
  EXPECT_TRUE(std::filesystem::exists(folder / "out/model.safetensors"));
  EXPECT_THAT(folder.names(), ElementsAre("out"));
}

TEST(ShardFolder, AFileInTheWay) {
  TestFolder folder;
  write_text(folder / "out", "x");
  const Disk disk;
  EXPECT_THROW(open_model_writer(disk, shards_in(folder / "out", 100)), CheckpointError);
  EXPECT_EQ(read_text(folder / "out"), "x");
}

}  // namespace
}  // namespace tessera::checkpoint

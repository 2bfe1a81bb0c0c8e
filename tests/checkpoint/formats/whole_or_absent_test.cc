// A model file is replaced atomically: after any failure, its name has the whole old model or the whole new
// one.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "checkpoint/checkpoint_error.h"
#include "core/files/file_descriptor.h"
#include "core/str.h"
#include "tests/checkpoint/formats/formats_testing.h"

namespace tessera::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

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

  // The operations of one write, in order.
  std::vector<std::string> operations() {
    std::vector<std::string> names;
    write_model(
        Disk({.sync = true, .probe = [&](std::string_view name, const auto&) { names.emplace_back(name); }}),
        options(), 1);
    return names;
  }

  TestFolder folder_;
};

TEST_P(WholeOrAbsent, EachOperationFails) {
  const size_t num_operations = operations().size();
  ASSERT_GT(num_operations, 15u);
  for (const bool exists : {false, true}) {
    for (size_t fatal = 0; fatal < num_operations; ++fatal) {
      std::filesystem::remove_all(folder_ / "out");
      const std::string new_model = written(2);
      std::filesystem::remove_all(folder_ / "out");
      const std::string old_model = exists ? written(1) : "";
      size_t count = 0;
      std::string failed;
      const Disk disk({.sync = true, .probe = [&](std::string_view name, const std::filesystem::path&) {
                         if (count++ != fatal) return;
                         failed = name;
                         throw DiskError("No space left on device");
                       }});
      try {
        write_model(disk, options(), 2);
        ASSERT_EQ(failed, "remove") << "only tidying up may fail unheard";
        EXPECT_TRUE(content_of(folder_ / "out") == new_model);
      } catch (const DiskError& error) {
        EXPECT_THAT(error.what(), HasSubstr("No space left"));
        const std::string content = content_of(folder_ / "out");
        EXPECT_TRUE(content == old_model || content == new_model) << fatal << ": " << failed;
      }
      if (std::filesystem::exists(folder_ / "out")) {
        EXPECT_THAT(folder_.names(), UnorderedElementsAre("out")) << fatal << ": " << failed;
      } else {
        EXPECT_THAT(folder_.names(), UnorderedElementsAre()) << fatal << ": " << failed;
      }
    }
  }
}

TEST_P(WholeOrAbsent, KilledAfterEachOperation) {
  const size_t num_operations = operations().size();
  for (size_t fatal = 0; fatal < num_operations; ++fatal) {
    std::filesystem::remove_all(folder_ / "out");
    const std::string new_model = written(2);
    const std::string old_model = written(1);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      size_t count = 0;
      write_model(Disk({.sync = true,
                        .probe =
                            [&](std::string_view, const auto&) {
                              if (count++ == fatal) ::kill(::getpid(), SIGKILL);
                            }}),
                  options(), 2);
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "operation " << fatal;
    const std::string content = content_of(folder_ / "out");
    EXPECT_TRUE(content == old_model || content == new_model) << fatal;
    EXPECT_TRUE(written(2) == new_model);
    EXPECT_THAT(folder_.names(), UnorderedElementsAre("out")) << "what the dead have left is removed";
  }
}

TEST_P(WholeOrAbsent, AbandonedWritersLeaveNothing) {
  const Disk disk;
  open_model_writer(disk, options());
  EXPECT_TRUE(folder_.names().empty());
}

TEST_P(WholeOrAbsent, AFileThatCannotGrow) {
  const std::string old_model = written(1);
  int report[2];
  ASSERT_EQ(::pipe(report), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {  // RLIMIT_FSIZE cannot be raised again
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{200, 200};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    std::string outcome = "no error";
    try {
      write_model(Disk(), options(), 2);
    } catch (const Error& error) {
      outcome = error.what();
    } catch (...) {
      outcome = "something else";
    }
    ::_exit(::write(report[1], outcome.data(), outcome.size()) > 0 ? 0 : 1);
  }
  ::close(report[1]);
  std::string outcome(1'000, '\0');
  const ssize_t length = ::read(report[0], outcome.data(), outcome.size());
  ::close(report[0]);
  outcome.resize(static_cast<size_t>(std::max<ssize_t>(length, 0)));
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_THAT(outcome, HasSubstr("File too large: this process may write files of at most 200 bytes"));
  EXPECT_TRUE(content_of(folder_ / "out") == old_model);
  EXPECT_THAT(folder_.names(), UnorderedElementsAre("out"));
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
    writer->append(random_bytes(writer->total_bytes(), static_cast<uint64_t>(seed)));
  second->finish();
  EXPECT_TRUE(content_of(folder_ / "out") == second_model);
  first->finish();
  EXPECT_TRUE(content_of(folder_ / "out") == first_model);
}

// Each ends well, whatever the others do at that moment.
TEST_P(WholeOrAbsent, EightWritersAgainAndAgain) {
  constexpr int kNumWriters = 8, kNumTimes = 25;
  std::set<std::string> models;
  for (int seed = 0; seed < kNumWriters; ++seed) models.insert(written(static_cast<uint64_t>(seed)));
  std::filesystem::remove_all(folder_ / "out");
  std::vector<pid_t> children;
  for (int seed = 0; seed < kNumWriters; ++seed) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      int code = 0;
      try {
        for (int time = 0; time < kNumTimes; ++time)
          write_model(Disk({.sync = false, .probe = {}}), options(), static_cast<uint64_t>(seed));
      } catch (const std::exception& error) {
        (void)!::write(STDERR_FILENO, error.what(), std::strlen(error.what()));
        code = 1;
      }
      ::_exit(code);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_TRUE(models.contains(content_of(folder_ / "out")));
  EXPECT_THAT(folder_.names(), UnorderedElementsAre("out"));
}

// Files of the user's own are linked into the new folder, by each writer.
TEST(ShardFolder, KeepsOtherFilesThroughEightWriters) {
  TestFolder folder;
  std::filesystem::create_directory(folder / "out");
  for (int i = 0; i < 50; ++i) write_text(folder / str("out/mine_", i), str(i));
  std::vector<pid_t> children;
  for (int seed = 0; seed < 8; ++seed) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      int code = 0;
      try {
        for (int time = 0; time < 20; ++time)
          write_model(Disk({.sync = false, .probe = {}}),
                      {.format = ModelFormat::kSafetensors,
                       .path = folder / "out",
                       .tensors = small_model(),
                       .max_shard_bytes = 150},
                      static_cast<uint64_t>(seed));
      } catch (const std::exception&) {
        code = 1;
      }
      ::_exit(code);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  for (int i = 0; i < 50; ++i) EXPECT_EQ(read_text(folder / str("out/mine_", i)), str(i));
}

// A symbolic link at a predicted temporary name. Names cannot be predicted, and links are not followed.
TEST_P(WholeOrAbsent, NothingIsWrittenThroughALink) {
  write_text(folder_ / "victim", "precious");
  std::vector<std::string> names;
  for (int i = 0; i < 3; ++i) {
    write_model(Disk({.sync = true,
                      .probe =
                          [&](std::string_view operation, const std::filesystem::path& path) {
                            if (operation == "create" && names.size() == static_cast<size_t>(i))
                              names.push_back(path.lexically_relative(folder_.path()).string());
                          }}),
                options(), 1);
    std::error_code ignored;
    if (std::filesystem::path(names.back()).has_parent_path()) continue;  // shards lie in a temporary folder
    std::filesystem::create_symlink("victim", folder_ / names.back());
    EXPECT_THROW(Disk().create(folder_ / names.back()), DiskError);
  }
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), 3u) << "another one each time";
  EXPECT_EQ(read_text(folder_ / "victim"), "precious");
}

// A zombie process: kill(pid, 0) reports it as alive.
TEST_P(WholeOrAbsent, WhatAZombieHasLeftIsRemoved) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const Disk disk;
    const auto writer = open_model_writer(disk, options());
    ::kill(::getpid(), SIGKILL);
  }
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_THAT(folder_.names(), ElementsAre(StartsWith("out.tmp-")));
  written(1);
  EXPECT_THAT(folder_.names(), UnorderedElementsAre("out"));
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
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
  write_model(Disk(),
              {.format = ModelFormat::kSafetensors,
               .path = folder / "link",
               .tensors = small_model(),
               .max_shard_bytes = 1'000'000},
              1);
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_TRUE(std::filesystem::exists(folder / "real/model.safetensors"));
  EXPECT_EQ(read_text(folder / "real/config.json"), "{}");
  EXPECT_THAT(folder.names(), UnorderedElementsAre("real", "link"));
}

TEST(ShardFolder, WithAFinalSlash) {
  TestFolder folder;
  for (int i = 0; i < 2; ++i)
    write_model(Disk(),
                {.format = ModelFormat::kSafetensors,
                 .path = folder / "out/",
                 .tensors = small_model(),
                 .max_shard_bytes = 1'000'000},
                1);
  EXPECT_TRUE(std::filesystem::exists(folder / "out/model.safetensors"));
  EXPECT_THAT(folder.names(), UnorderedElementsAre("out"));
}

TEST(ShardFolder, AFileInTheWay) {
  TestFolder folder;
  write_text(folder / "out", "x");
  const ModelWriterOptions options{.format = ModelFormat::kSafetensors,
                                   .path = folder / "out",
                                   .tensors = small_model(),
                                   .max_shard_bytes = 100};
  const Disk disk;
  EXPECT_THROW(open_model_writer(disk, options), CheckpointError);
  EXPECT_EQ(read_text(folder / "out"), "x");
}

}  // namespace
}  // namespace tessera::checkpoint

// SpillFile where something is wrong: full disks, directories, failing and short operations, kernels that
// lack what it asks for, killed processes, forked children.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <thread>
#include <vector>

#include "core/async_io/spill_file_internal.h"
#include "core/files/temporary_folder.h"
#include "core/str.h"
#include "tests/core/async_io/spill_file_testing.h"
#include "tests/support/child_process.h"
#include "tests/support/errors.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class SpillFileFault : public SpillFileTest {};
TESSERA_BOTH_WAYS(SpillFileFault);

constexpr const char* kNotPossible = "not possible here";
constexpr const char* kEnd = " (zero_optimization.offload_*.nvme_path)";

std::string error_of_opening(const SpillFileOptions& options) {
  return error_of<DiskError>([&] { const SpillFile file(options); });
}

/// What a file gives back for random bytes: "same" or "different".
std::string written_and_read(SpillFile& file, int64_t bytes) {
  const AlignedMemory written(bytes), read(bytes);
  std::mt19937_64 random(2);
  fill_random(written.span(), random);
  file.wait(file.write(0, written.span()));
  file.wait(file.read(0, read.span()));
  return read == written ? "same" : "different";
}

// ------------------------------------------------------------------------------------- opening the file

TEST_P(SpillFileFault, AFullDiskIsAnErrorAtTheStart) {
  const TemporaryFolder folder("spill");
  const std::string result = in_child([&]() -> std::string {
    if (::geteuid() != 0 && ::unshare(CLONE_NEWUSER) != 0) return kNotPossible;
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
      return kNotPossible;
    if (::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=6m") != 0) return kNotPossible;
    const auto available = [&] {
      struct statvfs status{};
      ::statvfs(folder.path().c_str(), &status);
      return static_cast<int64_t>(status.f_bavail * status.f_frsize);
    };
    std::string text = error_of_opening(options(folder.path(), 8 << 20)) + "\n";
    {
      SpillFile file(options(folder.path(), 4 << 20));
      text += written_and_read(file, 4 << 20);
      text += str(" ", available() <= 2 << 20, "\n", error_of_opening(options(folder.path(), 4 << 20)), "\n");
    }
    return text + str(available() == 6 << 20, fs::is_empty(folder.path()));
  });
  if (result == kNotPossible) GTEST_SKIP() << "mounting a small tmpfs is not allowed here";
  const auto message = [&](const char* wanted, const char* available) {
    return str("cannot reserve ", wanted, " bytes for optimizer state of rank 3 in ", folder.path(),
               ": No space left on device, ", available,
               " bytes are available there; choose a directory with more room", kEnd, "\n");
  };
  EXPECT_EQ(result,
            message("8,388,608", "6,291,456") + "same 1\n" + message("4,194,304", "2,097,152") + "11");
}

TEST_P(SpillFileFault, AReserveThatFails) {
  const TemporaryFolder folder("spill");
  SpillFileOptions failing = options(folder.path(), 100'000);
  std::vector<int64_t> asked;
  const ScopedSpillFileProbe probe([&](std::string_view operation, int64_t offset, int64_t bytes) {
    if (operation == "reserve") asked = {offset, bytes};
    return EDQUOT;
  });
  EXPECT_THAT(error_of_opening(failing),
              AllOf(StartsWith(str("cannot reserve 102,400 bytes for optimizer state of rank 3 in ",
                                   folder.path(), ": Disk quota exceeded, ")),
                    EndsWith(str(" bytes are available there; choose a directory with more room", kEnd))));
  EXPECT_THAT(asked, ElementsAre(0, 102'400));
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST_P(SpillFileFault, ALimitOfFileSizes) {
  const TemporaryFolder folder("spill");
  const std::string result = in_child([&] {  // SIGXFSZ is not ignored: it would end the child
    const rlimit limit{1'000'000, 1'000'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    return error_of_opening(options(folder.path(), 2 << 20));
  });
  EXPECT_THAT(result, HasSubstr(": File too large: this process may write files of at most 1000000 bytes"));
}

TEST_P(SpillFileFault, ADirectoryThatIsNone) {
  const TemporaryFolder folder("spill");
  const fs::path file = folder.path() / "file";
  std::ofstream(file) << "x";
  for (const fs::path& directory : {file, file / "below"})
    EXPECT_EQ(error_of_opening(options(directory, 1 << 20)),
              str("cannot make the directory for optimizer state of rank 3 in ", directory,
                  ": Not a directory; choose a directory that this process may write to", kEnd));
  EXPECT_EQ(error_of_opening(options("", 1 << 20)),
            str("no directory is given for optimizer state of rank 3; expected one on a local disk", kEnd));
}

TEST_P(SpillFileFault, ADirectoryThatMayNotBeWritten) {
  const TemporaryFolder folder("spill");
  const fs::path directory = folder.path() / "shared";
  fs::create_directory(directory);
  fs::permissions(folder.path(), fs::perms::all);
  fs::permissions(directory, fs::perms::owner_read | fs::perms::owner_exec | fs::perms::others_read |
                                 fs::perms::others_exec);
  const std::string result = in_child([&]() -> std::string {
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 && ::setresuid(kNobody, kNobody, kNobody) != 0) return kNotPossible;
    return error_of_opening(options(directory, 1 << 20)) + "\n" +
           error_of_opening(options(directory / "new", 1 << 20));
  });
  fs::permissions(directory, fs::perms::owner_all);
  if (result == kNotPossible) GTEST_SKIP() << "root cannot become another user here";
  const auto message = [](const char* what, const fs::path& path) {
    return str("cannot ", what, " for optimizer state of rank 3 in ", path,
               ": Permission denied; choose a directory that this process may write to", kEnd);
  };
  EXPECT_EQ(result,
            message("create a file", directory) + "\n" + message("make the directory", directory / "new"));
}

TEST_P(SpillFileFault, ADirectoryThatVanishes) {
  const TemporaryFolder folder("spill");
  const fs::path directory = folder.path() / "short-lived";
  SpillFile file(options(directory, 4 << 20));
  fs::remove_all(directory);
  EXPECT_EQ(written_and_read(file, 4 << 20), "same");
}

// ---------------------------------------------------------------------------------------- what is missing

/// One system call that fails; with `mask`, only if its third argument has one of these bits, and with
/// `second`, if that is its second argument.
struct Missing {
  const char* name;
  int call, error;
  uint32_t mask = 0, second = 0;
};

constexpr Missing kTmpfile{"O_TMPFILE", SYS_openat, EOPNOTSUPP, O_TMPFILE & ~O_DIRECTORY};
constexpr Missing kFallocate{"fallocate", SYS_fallocate, EOPNOTSUPP};
constexpr Missing kDirect{"O_DIRECT", SYS_fcntl, EINVAL, O_DIRECT, F_SETFL};

/// Takes these from this process, as a container's rules or a file system may.
bool take_away(const std::vector<Missing>& all) {
  std::vector<sock_filter> filter;
  const auto load = [&](size_t at) {
    filter.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(at)));
  };
  const auto load_argument = [&](size_t i) { load(offsetof(seccomp_data, args) + sizeof(uint64_t) * i); };
  for (const Missing& one : all) {
    const auto left = static_cast<uint8_t>(1 + (one.mask != 0 ? 2 : 0) + (one.second != 0 ? 2 : 0));
    load(offsetof(seccomp_data, nr));
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(one.call), 0, left));
    if (one.second != 0) {
      load_argument(1);
      filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, one.second, 0, 3));
    }
    if (one.mask != 0) {
      load_argument(2);
      filter.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, one.mask, 0, 1));
    }
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(one.error)));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST_P(SpillFileFault, WorksWithoutWhatAKernelOrAFileSystemMayLack) {
  const TemporaryFolder folder("spill");
  for (const std::vector<Missing>& missing : std::vector<std::vector<Missing>>{
           {kTmpfile}, {kFallocate}, {kDirect}, {kTmpfile, kFallocate, kDirect}}) {
    SCOPED_TRACE(str(missing.size(), " missing, first ", missing[0].name));
    const auto lacks = [&](const Missing& what) {
      return std::ranges::any_of(missing, [&](const Missing& one) { return one.call == what.call; });
    };
    const std::string result = in_child([&]() -> std::string {
      if (!take_away(missing)) return kNotPossible;
      SpillFile file(options(folder.path(), 4 << 20));
      struct stat status{};
      ::fstat(descriptor_in(folder.path()), &status);
      return str(written_and_read(file, 4 << 20), " ", file.direct() && lacks(kDirect), " ", status.st_nlink,
                 " ", status.st_mode & 0777, " ", status.st_size, " ", fs::is_empty(folder.path()), "\n",
                 error_of_opening(options(folder.path(), int64_t{1} << 43)));
    });
    if (result == kNotPossible) GTEST_SKIP() << "seccomp is not allowed here";
    EXPECT_THAT(result, AllOf(StartsWith(str("same 0 0 ", 0600, " 4194304 1\ncannot reserve ")),
                              HasSubstr("No space left on device, ")));
  }
}

// -------------------------------------------------------------------------------------------- transfers

TEST_P(SpillFileFault, AFailedPieceFailsItsTransferOnly) {
  const TemporaryFolder folder("spill");
  SpillFileOptions failing = options(folder.path(), 8 << 20);
  failing.piece_bytes = 1 << 20;
  std::atomic<int64_t> bad = 3 << 20;
  const ScopedSpillFileProbe probe([&](std::string_view operation, int64_t offset, int64_t) {
    return operation != "reserve" && offset == bad ? EIO : 0;
  });
  SpillFile file(failing);
  const AlignedMemory memory(8 << 20, 3), read(8 << 20);
  const auto good = file.write(0, memory.part(0, 3 << 20));
  const auto wrong = file.write(3 << 20, memory.part(3 << 20, 5 << 20));
  file.wait(good);
  const std::string message =
      str(" 5,242,880 bytes at byte 3,145,728 of optimizer state of rank 3 in ", folder.path(),
          ": Input/output error; check that disk, or choose another directory", kEnd);
  for (int i = 0; i < 2; ++i)  // at every call
    EXPECT_EQ(error_of<DiskError>([&] { file.wait(wrong); }), "cannot write" + message);
  EXPECT_TRUE(file.done(wrong));
  const auto wrong_too = file.read(3 << 20, read.part(3 << 20, 5 << 20));
  EXPECT_EQ(error_of<DiskError>([&] { file.wait(wrong_too); }), "cannot read" + message);
  EXPECT_EQ(file.bytes_written(), 3 << 20);
  EXPECT_EQ(file.bytes_read(), 0);
  bad = -1;
  file.wait(file.write(3 << 20, memory.part(3 << 20, 5 << 20)));
  file.wait(file.read(0, read.span()));
  EXPECT_TRUE(read == memory);
}

TEST_P(SpillFileFault, InterruptedAndBusyOperationsAreDoneAgain) {
  const TemporaryFolder folder("spill");
  SpillFileOptions busy = options(folder.path(), 4 << 20);
  busy.piece_bytes = 1 << 20;
  std::atomic<int> count = 0;
  const ScopedSpillFileProbe probe([&](std::string_view operation, int64_t, int64_t) {
    if (operation == "reserve") return 0;
    constexpr int kAnswers[] = {EINTR, EAGAIN, EAGAIN, EINTR, 0};
    return kAnswers[count++ % 5];
  });
  SpillFile file(busy);
  EXPECT_EQ(written_and_read(file, 4 << 20), "same");
  EXPECT_EQ(count, 5 * 8);
}

TEST_P(SpillFileFault, AKernelThatStaysBusyIsAnErrorInTheEnd) {
  const TemporaryFolder folder("spill");
  SpillFileOptions busy = options(folder.path(), kBlock);
  const ScopedSpillFileProbe probe(
      [](std::string_view operation, int64_t, int64_t) { return operation == "read" ? EAGAIN : 0; });
  SpillFile file(busy);
  const AlignedMemory memory(kBlock);
  EXPECT_THAT(error_of<DiskError>([&] { file.wait(file.read(0, memory.span())); }),
              HasSubstr(": Resource temporarily unavailable; "));
}

TEST_P(SpillFileFault, AShortWriteIsContinued) {
  const TemporaryFolder folder("spill");
  // SIGXFSZ is not ignored: threads of SpillFile have it blocked.
  const std::string result = in_child([&] {
    const auto limit_to = [](rlim_t bytes) {
      const rlimit limit{bytes, RLIM_INFINITY};
      ::setrlimit(RLIMIT_FSIZE, &limit);
    };
    SpillFileOptions limited = options(folder.path(), 1 << 20);
    std::atomic<bool> stays = false;
    std::string operations;
    const ScopedSpillFileProbe probe([&](std::string_view operation, int64_t offset, int64_t bytes) {
      if (operation != "write") return 0;
      operations += str(offset, "+", bytes, " ");
      limit_to(offset == 0 || stays ? 512 << 10 : RLIM_INFINITY);
      return 0;
    });
    SpillFile file(limited);
    std::string text = written_and_read(file, 1 << 20) + " " + operations;
    stays = true;
    const AlignedMemory memory(1 << 20);
    text += error_of<DiskError>([&] { file.wait(file.write(0, memory.span())); });
    limit_to(RLIM_INFINITY);
    return text;
  });
  EXPECT_THAT(result,
              AllOf(StartsWith("same 0+1048576 524288+524288 cannot write 1,048,576 bytes at byte 0 of "),
                    HasSubstr(": File too large: this process may write files of at most 524288 bytes")));
}

// Direct I/O may end anywhere, and goes on at the block in which it has ended.
TEST_P(SpillFileFault, AShortReadIsContinued) {
  const TemporaryFolder folder("spill");
  constexpr int64_t kBytes = 1 << 20, kCut = (512 << 10) + 1536;
  SpillFileOptions cut = options(folder.path(), kBytes);
  int descriptor = -1;
  bool restore = false;
  std::vector<int64_t> offsets;
  const ScopedSpillFileProbe probe([&](std::string_view operation, int64_t offset, int64_t) {
    if (operation != "read") return 0;
    offsets.push_back(offset);
    return restore && offset > 0 && ::ftruncate(descriptor, kBytes) != 0 ? errno : 0;
  });
  SpillFile file(cut);
  descriptor = descriptor_in(folder.path());
  const AlignedMemory memory(kBytes, 9), expected(kBytes), read(kBytes, 1);
  file.wait(file.write(0, memory.span()));
  ASSERT_EQ(::ftruncate(descriptor, kCut), 0);
  EXPECT_EQ(
      error_of<DiskError>([&] { file.wait(file.read(0, read.span())); }),
      str("cannot read 1,048,576 bytes at byte 0 of optimizer state of rank 3 in ", folder.path(),
          ": the file ends there: another process has cut it; check that disk, or choose another directory",
          kEnd));
  const int64_t continued = file.direct() ? 512 << 10 : kCut;
  EXPECT_THAT(offsets, ElementsAre(0, continued));
  restore = true;
  file.wait(file.read(0, read.span()));
  EXPECT_THAT(offsets, ElementsAre(0, continued, 0, continued));
  std::ranges::copy(memory.part(0, kCut), expected.span().begin());
  EXPECT_TRUE(read == expected);
}

// -------------------------------------------------------------------------------------------- processes

TEST_P(SpillFileFault, AKilledProcessLeavesNothing) {
  const TemporaryFolder folder("spill");
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    SpillFile file(options(folder.path(), 32 << 20));
    const AlignedMemory memory(32 << 20, 1);
    file.wait(file.write(0, memory.span()));
    const bool told = ::write(ends[1], "x", 1) == 1;
    while (told) file.wait(file.write(0, memory.span()));
    ::_exit(1);
  }
  char told = 0;
  EXPECT_EQ(::read(ends[0], &told, 1), 1);
  ::kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(fs::is_empty(folder.path()));
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_P(SpillFileFault, AForkedChildCannotUseItAndLeavesItAlone) {
  const TemporaryFolder folder("spill");
  auto file = std::make_unique<SpillFile>(options(folder.path(), 16 << 20));
  const AlignedMemory memory(16 << 20, 1), read(16 << 20);
  const auto transfer = file->write(0, memory.span());
  const std::string result = in_child([&] {
    std::string text = error_of<std::logic_error>([&] { file->read(0, read.span()); });
    text += "\n" + error_of<std::logic_error>([&] { file->wait(transfer); });
    file.reset();
    return text + str("\n", descriptor_in(folder.path()));
  });
  EXPECT_THAT(result, AllOf(HasSubstr("cannot be used in a forked child\n"),
                            EndsWith("cannot be used in a forked child\n-1")));
  file->wait(transfer);
  file->wait(file->read(0, read.span()));
  EXPECT_TRUE(read == memory);
}

}  // namespace
}  // namespace tessera::testing

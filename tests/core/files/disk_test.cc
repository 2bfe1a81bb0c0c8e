#include "core/files/disk.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <set>
#include <vector>

#include "core/files/pending_file.h"
#include "core/files/temporary_folder.h"
#include "core/files/temporary_name.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

TEST(ReplaceFile, LeavesTheFileAlone) {
  const TemporaryFolder folder("disk");
  const fs::path path = folder.path() / "a";
  for (const std::string content : {"the first, longer", "second", ""}) {
    replace_file(path, content);
    EXPECT_EQ(InputFile(path).read_all(100), content);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1) << "no temporary file stays";
}

/// The names a file was created under while `action` ran.
std::vector<fs::path> created(const std::function<void(const Disk&)>& action) {
  std::vector<fs::path> paths;
  action(Disk({.sync = true, .probe = [&](std::string_view operation, const fs::path& path) {
                 if (operation == "create") paths.push_back(path);
               }}));
  return paths;
}

TEST(ReplaceFile, ItsTemporaryNameCannotBeForeseenAndNoLinkIsFollowed) {
  const TemporaryFolder folder("disk");
  const fs::path path = folder.path() / "a", victim = folder.path() / "victim";
  replace_file(victim, "precious");
  fs::create_symlink("victim", folder.path() / "a.tmp");
  std::set<fs::path> names;
  for (int i = 0; i < 50; ++i)
    for (const fs::path& name : created([&](const Disk& disk) { disk.replace_file(path, "new"); })) {
      EXPECT_EQ(name_of_temporary(name.filename().string()), "a");
      names.insert(name);
    }
  EXPECT_EQ(names.size(), 50u);
  EXPECT_EQ(InputFile(victim).read_all(), "precious");

  const fs::path taken = temporary_path(path);
  fs::create_symlink("victim", taken);
  EXPECT_NE(testing::error_of<DiskError>([&] { Disk().create(taken); }), "");
  EXPECT_NE(testing::error_of<DiskError>([&] { Disk().create(victim); }), "");
  EXPECT_EQ(InputFile(victim).read_all(), "precious");
}

TEST(ReplaceFile, RefusesWhatIsNoFile) {
  const TemporaryFolder folder("disk");
  const fs::path fifo = folder.path() / "fifo", link = folder.path() / "link";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  fs::create_symlink("fifo", link);
  for (const fs::path& path : {fifo, link})
    EXPECT_NE(testing::error_of<DiskError>([&] {
                replace_file(path, "a");
              }).find(path.string() + " is a FIFO, a socket or a device, which a file would replace"),
              std::string::npos);
  EXPECT_TRUE(fs::is_fifo(fifo));
  EXPECT_TRUE(fs::is_symlink(link));
}

TEST(ReplaceFile, RemovesWhatAKilledProcessHasLeft) {
  const TemporaryFolder folder("disk");
  const fs::path path = folder.path() / "a";
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Disk({.sync = true,
          .probe =
              [](std::string_view operation, const fs::path&) {
                if (operation == "write") ::kill(::getpid(), SIGKILL);
              }})
        .replace_file(path, "half");
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1) << "what it has left";
  const Disk disk;
  PendingFile other(disk, folder.path() / "a.other");  // another file's, and held besides
  PendingFile ours(disk, path);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 2) << "both pending ones";
  replace_file(path, "new");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 3)
      << "a pending file is held by its process";
  ours.file().append("newer");
  ours.publish();
  EXPECT_EQ(InputFile(path).read_all(), "newer");
}

TEST(ReplaceFile, NamesTheLimitOfFileSizes) {
  const TemporaryFolder folder("disk");
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1000, 1000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::string error =
        testing::error_of<DiskError>([&] { replace_file(folder.path() / "a", std::string(2000, 'x')); });
    ::_exit(error.find(": File too large: this process may write files of at most 1000 bytes (ulimit -f") ==
                    error.npos
                ? 1
                : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(ReplaceFile, SaysWhichFileItCannotWrite) {
  const TemporaryFolder folder("disk");
  EXPECT_NE(
      testing::error_of<DiskError>([&] { replace_file(folder.path() / "none" / "a", "x"); }).find("none/a"),
      std::string::npos);
  fs::create_directory(folder.path() / "folder");
  EXPECT_NE(testing::error_of<DiskError>([&] { replace_file(folder.path() / "folder", "x"); }), "");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1) << "no temporary file stays";
}

/// In a child that has no RENAME_EXCHANGE, as on NFS; its exit code.
int without_exchange(const std::function<int()>& action) {
  const pid_t child = ::fork();
  if (child == 0) {
    const auto at = [](size_t offset) { return static_cast<uint32_t>(offset); };
    const std::vector<sock_filter> filter = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at(offsetof(seccomp_data, nr))),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat2, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at(offsetof(seccomp_data, args) + 4 * sizeof(uint64_t))),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, RENAME_EXCHANGE, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const sock_fprog program{static_cast<unsigned short>(filter.size()),
                             const_cast<sock_filter*>(filter.data())};
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
      ::_exit(77);
    ::_exit(action());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Exchange, WhereTheFileSystemHasNone) {
  const TemporaryFolder folder("disk");
  const fs::path old = folder.path() / "step", made = folder.path() / "new";
  const auto content = [](const fs::path& at) { return InputFile(at / "file").read_all(); };
  for (const fs::path& path : {old, made}) {
    fs::create_directory(path);
    replace_file(path / "file", path.filename().string());
  }
  int code = without_exchange([&] {
    Disk().exchange(made, old);
    return 0;
  });
  if (code == 77) GTEST_SKIP() << "no seccomp";
  ASSERT_EQ(code, 0);
  EXPECT_EQ(content(old), "new");
  EXPECT_EQ(content(made), "step");
  code = without_exchange([&] {
    try {
      Disk().exchange(folder.path() / "absent", old);
    } catch (const DiskError&) {
      return 1;
    }
    return 0;
  });
  EXPECT_EQ(code, 1);
  EXPECT_EQ(content(old), "new") << "what cannot be replaced stays";
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 2);
}

}  // namespace
}  // namespace tessera

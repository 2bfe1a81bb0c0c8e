// From made-up facts to findings.
#include "tools/doctor/doctor_judgement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace tessera::tools {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::Field;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr int64_t kGB = 1'000'000'000;

HostReport good_host(const std::string& name) {
  HostReport host;
  host.name = name;
  host.num_ranks = 2;
  host.has_facts = true;
  host.facts = {.name = name,
                .cores = 8,
                .machine_cores = 8,
                .memory = 64 * kGB,
                .free_memory = 60 * kGB,
                .shm = 32 * kGB,
                .free_shm = 32 * kGB,
                .open_files = 65536,
                .no_gpu = "no NVIDIA driver",
                .torch = "2.11.0",
                .build = "0.1.0 (abcd)"};
  host.address = "10.0.0.1";
  host.interface = "eth0";
  return host;
}

DoctorReport good_report() {
  DoctorReport report;
  report.hosts = {good_host("n1"), good_host("n2")};
  report.num_ranks = 4;
  report.backend = "hybrid";
  report.device = "CPUs";
  return report;
}

std::vector<Finding> bad(const DoctorReport& report) {
  std::vector<Finding> found = judge(report);
  std::erase_if(found, [](const Finding& finding) { return finding.level == Level::kOk; });
  return found;
}

auto finding(Level level, const std::string& host, const std::string& check, const std::string& found,
             const std::string& advice) {
  return AllOf(Field(&Finding::level, level), Field(&Finding::host, host), Field(&Finding::check, check),
               Field(&Finding::found, HasSubstr(found)), Field(&Finding::advice, HasSubstr(advice)));
}

TEST(DoctorJudgement, GoodHostsHaveNoAdvice) {
  const std::vector<Finding> found = judge(good_report());
  EXPECT_EQ(count(found, Level::kOk), static_cast<int>(found.size()));
  for (const char* check : {"cores", "memory", "/dev/shm", "open files", "GPUs", "network"})
    for (const char* host : {"n1", "n2"})
      EXPECT_THAT(found, testing::Contains(finding(Level::kOk, host, check, "", ""))) << check;
  for (const Finding& one : found) EXPECT_EQ(one.advice, "") << one.check;
}

TEST(DoctorJudgement, UnreachableHostIsAProblemAndOthersAreChecked) {
  DoctorReport report = good_report();
  report.hosts[1] = HostReport{};
  report.hosts[1].name = "n2";
  report.hosts[1].unreachable = "ssh: connect to host n2 port 22: Connection refused";
  EXPECT_THAT(bad(report),
              ElementsAre(finding(Level::kProblem, "n2", "reach", "Connection refused", "start sshd there")));
}

TEST(DoctorJudgement, AdviceFollowsWhatSshSaid) {
  EXPECT_THAT(advice_for_unreachable("n2", "root@n2: Permission denied (publickey)."),
              HasSubstr("ssh-copy-id n2"));
  EXPECT_THAT(advice_for_unreachable("n2", "ssh: Could not resolve hostname n2: Name or service not known"),
              HasSubstr("/etc/hosts"));
  EXPECT_THAT(advice_for_unreachable("n2", "Host key verification failed."),
              HasSubstr("accept the host's key"));
  EXPECT_THAT(advice_for_unreachable("n2", "ssh: connect to host n2 port 22: No route to host"),
              HasSubstr("switch the host on"));
  EXPECT_THAT(advice_for_unreachable("n2", "env: '/opt/tessera': No such file or directory"),
              HasSubstr("same paths"));
  EXPECT_THAT(advice_for_unreachable("n2", "exit code 3"), HasSubstr("ssh -o BatchMode=yes n2 true"));
}

TEST(DoctorJudgement, MoreRanksThanCores) {
  DoctorReport report = good_report();
  report.hosts[0].facts.cores = 1;
  EXPECT_THAT(bad(report), ElementsAre(finding(Level::kWarning, "n1", "cores",
                                               "1 core for 2 ranks; the machine has 8", "--nproc 1")));
  report.hosts[0].facts.gpus = 2;  // which is where these ranks compute
  EXPECT_THAT(bad(report), IsEmpty());
}

TEST(DoctorJudgement, MemoryIsCountedByRank) {
  DoctorReport report = good_report();
  report.hosts[1].facts.free_memory = 2 * (512 << 20);
  EXPECT_THAT(bad(report), IsEmpty());
  report.hosts[1].facts.free_memory -= 2;
  report.hosts[1].facts.memory_limit = 2 * kGB;
  EXPECT_THAT(bad(report), ElementsAre(finding(Level::kWarning, "n2", "memory",
                                               "1.1 GB free of 64.0 GB, limit 2.0 GB", "511 MiB for each")));
  report.hosts[1].facts.free_memory = 100 << 20;
  EXPECT_THAT(bad(report),
              ElementsAre(finding(Level::kProblem, "n2", "memory", "0.1 GB free", "50 MiB for each")));
}

TEST(DoctorJudgement, SmallSharedMemory) {
  DoctorReport report = good_report();
  report.hosts[0].facts.shm = report.hosts[0].facts.free_shm = 64 << 20;
  report.hosts[1].facts.shm = -1;
  EXPECT_THAT(bad(report),
              ElementsAre(finding(Level::kWarning, "n1", "/dev/shm", "0.1 GB free of 0.1 GB", "--shm-size"),
                          finding(Level::kWarning, "n2", "/dev/shm", "not there", "mount a tmpfs")));
}

TEST(DoctorJudgement, OpenFilesGrowWithTheGroup) {
  DoctorReport report = good_report();
  report.hosts[0].facts.open_files = 512;
  EXPECT_THAT(bad(report), IsEmpty());
  report.num_ranks = 100;  // 20 + 4 each are needed, 200 are the program's own
  EXPECT_THAT(bad(report), ElementsAre(finding(Level::kWarning, "n1", "open files",
                                               "512; a rank needs about 420", "ulimit -n 620, which root")));
  report.num_ranks = 400;
  EXPECT_THAT(bad(report),
              ElementsAre(finding(Level::kProblem, "n1", "open files", "about 1620", "root has to allow")));
  report.hosts[0].facts.open_files = -1;
  EXPECT_THAT(bad(report), IsEmpty());
}

TEST(DoctorJudgement, Gpus) {
  DoctorReport report = good_report();
  HostFacts& facts = report.hosts[0].facts;
  facts.driver = "550.54";
  facts.no_gpu = "libcudnn.so.9 is not installed";
  EXPECT_THAT(bad(report), ElementsAre(finding(Level::kWarning, "n1", "GPUs",
                                               "none: libcudnn.so.9 is not installed", "on the CPU")));
  facts.gpus = 1;
  facts.nccl = "2.28.9";
  EXPECT_THAT(bad(report), ElementsAre(finding(Level::kWarning, "n1", "GPUs", "1, driver 550.54, NCCL 2.28.9",
                                               "--nproc 1")));
  facts.gpus = 2;
  EXPECT_THAT(bad(report), IsEmpty());
}

TEST(DoctorJudgement, LoopbackBetweenHosts) {
  DoctorReport report = good_report();
  report.hosts[1].address = "127.0.1.1";
  report.hosts[1].interface = "lo";
  EXPECT_THAT(bad(report),
              ElementsAre(finding(Level::kProblem, "n2", "network", "127.0.1.1 on lo", "/etc/hosts")));
  report.hosts.erase(report.hosts.begin());
  EXPECT_THAT(bad(report), IsEmpty()) << "one host";
}

TEST(DoctorJudgement, NetworkOfOneHost) {
  DoctorReport report = good_report();
  report.hosts[1].interface = "docker0";
  EXPECT_THAT(bad(report),
              ElementsAre(finding(Level::kWarning, "n2", "network", "docker0", "GLOO_SOCKET_IFNAME")));
}

TEST(DoctorJudgement, ClocksApart) {
  DoctorReport report = good_report();
  report.hosts[1].has_clock = true;
  report.hosts[1].clock_s = -0.09;
  EXPECT_THAT(bad(report), IsEmpty());
  report.hosts[1].clock_s = -2.5;
  report.hosts[1].clock_error_s = 0.0002;
  EXPECT_THAT(bad(report),
              ElementsAre(finding(Level::kWarning, "n2", "clock", "-2500 ms, known to 0.20 ms", "chrony")));
  report.hosts[1].clock_error_s = 2.45;  // a slow network: they may be equal
  EXPECT_THAT(bad(report), IsEmpty());
}

TEST(DoctorJudgement, OtherBuildsAndVersions) {
  DoctorReport report = good_report();
  report.hosts[1].facts.torch = "2.10.0";
  report.hosts[1].facts.build = "0.1.0 (ffff)";
  EXPECT_THAT(
      bad(report),
      ElementsAre(
          finding(Level::kProblem, "", "libtorch", "n1 has 2.11.0, n2 has 2.10.0", "install the same"),
          finding(Level::kProblem, "", "tessera", "n1 has 0.1.0 (abcd), n2 has 0.1.0 (ffff)", "install")));
}

TEST(DoctorJudgement, RanksThatDoNotMeet) {
  DoctorReport report = good_report();
  report.backend = "";
  report.no_group = "rank 2 does not answer";
  report.warnings = {"the ranks use Gloo"};
  EXPECT_THAT(bad(report),
              ElementsAre(finding(Level::kProblem, "", "ranks", "rank 2 does not answer", "firewalls"),
                          finding(Level::kWarning, "", "ranks", "use Gloo", "docs/communication.md")));
}

TEST(DoctorJudgement, UseOfTheLink) {
  DoctorReport report = good_report();
  report.hosts[0].link_bits_per_s = 10 * kGB;
  report.hosts[1].link_bits_per_s = 40 * kGB;
  report.collectives = {{"all_reduce", 1 << 12, 1}, {"all_reduce", kGB, 1}};  // 8 of 10 Gbit/s, on 2 hosts
  EXPECT_THAT(judge(report), testing::Contains(finding(Level::kOk, "", "links", "80 % of 10.0 Gbit/s", "")));
  report.hosts.emplace_back().unreachable = "off";  // carries nothing
  EXPECT_THAT(judge(report), testing::Contains(finding(Level::kOk, "", "links", "80 % of 10.0 Gbit/s", "")));
  report.hosts.pop_back();
  report.collectives[1].seconds = 4;
  EXPECT_THAT(bad(report), ElementsAre(finding(Level::kWarning, "", "links", "20 % of 10.0 Gbit/s", "MTU")));
}

TEST(DoctorJudgement, BusBandwidthIsThatOfNcclTests) {
  const auto bus = [](const char* name, int num_ranks) { return bus_bandwidth({name, 8000, 2}, num_ranks); };
  EXPECT_DOUBLE_EQ(algorithm_bandwidth({"all_reduce", 8000, 2}), 4000);
  EXPECT_DOUBLE_EQ(bus("all_reduce", 4), 6000);
  EXPECT_DOUBLE_EQ(bus("all_gather", 4), 3000);
  EXPECT_DOUBLE_EQ(bus("reduce_scatter", 4), 3000);
  EXPECT_DOUBLE_EQ(bus("broadcast", 4), 4000);
}

TEST(DoctorReport, ComesBackFromJson) {
  DoctorReport report = good_report();
  report.hosts[0].has_clock = true;
  report.hosts[0].clock_s = 0.25;
  report.collectives = {{"all_gather", 4096, 1e-5}};
  report.warnings = {"one"};
  EXPECT_EQ(nlohmann::json::parse(nlohmann::json(report).dump()).get<DoctorReport>(), report);
}

}  // namespace
}  // namespace tessera::tools

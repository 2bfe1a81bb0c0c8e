#include "tools/doctor/doctor_judgement.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "comm/sockets/open_files.h"
#include "core/str.h"
#include "tools/common/columns.h"

namespace tessera::tools {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kLeastMemory = 128 * kMiB;  ///< for a rank: libtorch's code and buffers
constexpr int64_t kLowMemory = 512 * kMiB;
constexpr int64_t kLowShm = 1000 * kMiB;  ///< containers have 64 MiB unless they are told otherwise
constexpr int64_t kFilesOfProgram = 200;  ///< data, logs, checkpoints, libraries
constexpr double kClockDifference = 0.1;  ///< seconds; the first failure of a run is found by the clocks
constexpr double kLowUseOfLink = 0.3;

std::string gigabytes(int64_t bytes) { return fixed(static_cast<double>(bytes) / 1e9, 1) + " GB"; }

/// Findings of one host, or of the group.
class Findings {
 public:
  Findings(std::vector<Finding>& all, std::string host) : all_(all), host_(std::move(host)) {}

  void add(const std::string& check, const std::string& found) { add(Level::kOk, check, found, ""); }
  void add(Level level, const std::string& check, const std::string& found, const std::string& advice) {
    all_.push_back({level, host_, check, found, level == Level::kOk ? "" : advice});
  }

 private:
  std::vector<Finding>& all_;
  const std::string host_;
};

void judge_cores(Findings& findings, const HostFacts& facts, int num_ranks) {
  std::string found = str(facts.cores, facts.cores == 1 ? " core" : " cores", " for ", num_ranks,
                          num_ranks == 1 ? " rank" : " ranks");
  if (facts.cores < facts.machine_cores) found += str("; the machine has ", facts.machine_cores);
  const bool too_few = num_ranks > facts.cores && facts.gpus < num_ranks;
  findings.add(too_few ? Level::kWarning : Level::kOk, "cores", found,
               str("ranks take turns on a core: --nproc ", facts.cores,
                   ", or allow more cores (affinity, quota of the control group)"));
}

void judge_memory(Findings& findings, const HostFacts& facts, int num_ranks) {
  std::string found = str(gigabytes(facts.free_memory), " free of ", gigabytes(facts.memory));
  if (facts.memory_limit >= 0) found += str(", limit ", gigabytes(facts.memory_limit));
  const int64_t share = facts.free_memory / num_ranks;
  const Level level = share < kLeastMemory ? Level::kProblem
                      : share < kLowMemory ? Level::kWarning
                                           : Level::kOk;
  findings.add(
      level, "memory", found,
      str(share / kMiB,
          " MiB for each rank: end other programs, raise the limit, or start fewer ranks; tessera memory "
          "--fit finds what fits"));
}

void judge_shm(Findings& findings, const HostFacts& facts) {
  const std::string advice =
      "NCCL and Python's data loaders put data there (ranks on CPUs do not): mount -o remount,size=2g "
      "/dev/shm, "
      "docker run --shm-size=2g";
  if (facts.shm < 0)
    return findings.add(Level::kWarning, "/dev/shm", "not there", "mount a tmpfs there: " + advice);
  findings.add(facts.free_shm < kLowShm ? Level::kWarning : Level::kOk, "/dev/shm",
               str(gigabytes(facts.free_shm), " free of ", gigabytes(facts.shm)), advice);
}

void judge_open_files(Findings& findings, const HostFacts& facts, int world_size) {
  if (facts.open_files < 0) return findings.add("open files", "no limit");
  const int64_t needed = comm::files_of_group(world_size, /*serves_store=*/true, "gloo");
  const Level level = facts.open_files < needed                     ? Level::kProblem
                      : facts.open_files < needed + kFilesOfProgram ? Level::kWarning
                                                                    : Level::kOk;
  findings.add(level, "open files", str(facts.open_files, "; a rank needs about ", needed),
               str("ulimit -n ", needed + kFilesOfProgram, ", which root has to allow (limits.conf)"));
}

void judge_gpus(Findings& findings, const HostFacts& facts, int num_ranks) {
  if (facts.gpus == 0) {
    const bool has_driver = !facts.driver.empty();
    return findings.add(has_driver ? Level::kWarning : Level::kOk, "GPUs", "none: " + facts.no_gpu,
                        "ranks train on the CPU until this is mended");
  }
  findings.add(facts.gpus < num_ranks ? Level::kWarning : Level::kOk, "GPUs",
               str(facts.gpus, ", driver ", facts.driver, ", NCCL ", facts.nccl),
               str("more ranks than GPUs train on the CPU: --nproc ", facts.gpus));
}

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

void judge_network(Findings& findings, const HostReport& host, bool several_hosts) {
  if (host.address.empty()) return;
  std::string found = host.address;
  if (!host.interface.empty()) found += " on " + host.interface;
  if (host.link_bits_per_s > 0)
    found += str(", ", fixed(static_cast<double>(host.link_bits_per_s) / 1e9, 1), " Gbit/s");
  if (host.mtu > 0) found += str(", MTU ", host.mtu);
  if (!host.chosen_by.empty()) found += str(" (", host.chosen_by, ")");
  const bool is_virtual = host.interface.starts_with("docker") || host.interface.starts_with("virbr");
  if (several_hosts && is_loopback(host.address))
    return findings.add(Level::kProblem, "network", found,
                        "other hosts cannot reach it: correct the host's name in /etc/hosts, or set "
                        "GLOO_SOCKET_IFNAME and --master-addr");
  findings.add(
      several_hosts && is_virtual ? Level::kWarning : Level::kOk, "network", found,
      "a network of this host alone: GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) names another interface");
}

std::string milliseconds(double seconds) {
  return fixed(seconds * 1e3, std::abs(seconds) < 0.1 ? 2 : 0) + " ms";
}

void judge_clock(Findings& findings, const HostReport& host) {
  if (!host.has_clock) return;
  const std::string found = str(host.clock_s < 0 ? "" : "+", milliseconds(host.clock_s), ", known to ",
                                milliseconds(host.clock_error_s));
  findings.add(
      std::abs(host.clock_s) - host.clock_error_s > kClockDifference ? Level::kWarning : Level::kOk, "clock",
      found, "logs and the rank that failed first are compared by clocks: start chrony or systemd-timesyncd");
}

void judge_host(std::vector<Finding>& all, const HostReport& host, const DoctorReport& report) {
  Findings findings(all, host.name);
  if (!host.unreachable.empty())
    return findings.add(Level::kProblem, "reach", host.unreachable,
                        advice_for_unreachable(host.name, host.unreachable));
  if (host.has_facts) {
    judge_cores(findings, host.facts, host.num_ranks);
    judge_memory(findings, host.facts, host.num_ranks);
    judge_shm(findings, host.facts);
    judge_open_files(findings, host.facts, report.num_ranks);
    judge_gpus(findings, host.facts, host.num_ranks);
  }
  judge_network(findings, host, report.hosts.size() > 1);
  judge_clock(findings, host);
}

/// The hosts whose `what` differs from that of the first one.
std::string differing(const DoctorReport& report, const std::string& (*what)(const HostReport&)) {
  const HostReport* first = nullptr;
  std::string names;
  for (const HostReport& host : report.hosts) {
    if (!host.has_facts) continue;
    if (!first) first = &host;
    if (what(host) != what(*first)) names += str(names.empty() ? "" : ", ", host.name, " has ", what(host));
  }
  return names.empty() ? "" : str(first->name, " has ", what(*first), ", ", names);
}

const std::string& torch_of(const HostReport& host) { return host.facts.torch; }
const std::string& build_of(const HostReport& host) { return host.facts.build; }

void judge_versions(Findings& findings, const DoctorReport& report) {
  const auto first = std::find_if(report.hosts.begin(), report.hosts.end(),
                                  [](const HostReport& host) { return host.has_facts; });
  if (first == report.hosts.end()) return;
  for (const auto& [check, what] : {std::pair{"libtorch", &torch_of}, std::pair{"tessera", &build_of}}) {
    const std::string difference = differing(report, what);
    findings.add(difference.empty() ? Level::kOk : Level::kProblem, check,
                 difference.empty() ? what(*first) : difference,
                 "install the same on all hosts, at the same path");
  }
}

/// How much of the slowest link between hosts an all-reduce of the largest buffer uses.
void judge_links(Findings& findings, const DoctorReport& report) {
  int64_t slowest = 0, num_reached = 0;
  for (const HostReport& host : report.hosts) num_reached += host.unreachable.empty() ? 1 : 0;
  for (const HostReport& host : report.hosts)
    if (host.link_bits_per_s > 0)
      slowest = slowest == 0 ? host.link_bits_per_s : std::min(slowest, host.link_bits_per_s);
  const CollectiveTiming* largest = nullptr;
  for (const CollectiveTiming& timing : report.collectives)
    if (timing.name == "all_reduce" && (!largest || timing.bytes > largest->bytes)) largest = &timing;
  if (slowest == 0 || !largest || num_reached < 2) return;
  const auto num_hosts = static_cast<double>(num_reached);
  const double used =
      algorithm_bandwidth(*largest) * 2 * (num_hosts - 1) / num_hosts * 8 / static_cast<double>(slowest);
  findings.add(used < kLowUseOfLink ? Level::kWarning : Level::kOk, "links",
               str("an all-reduce uses ", fixed(used * 100, 0), " % of ",
                   fixed(static_cast<double>(slowest) / 1e9, 1), " Gbit/s"),
               "look at the load of the network, the MTU of hosts and switches, and which interface is used");
}

void judge_group(std::vector<Finding>& all, const DoctorReport& report) {
  Findings findings(all, "");
  judge_versions(findings, report);
  if (!report.no_group.empty())
    findings.add(Level::kProblem, "ranks", report.no_group,
                 "hosts have to reach each other on all ports above 1023 (docs/security.md): look at "
                 "firewalls and names");
  for (const std::string& warning : report.warnings)
    findings.add(Level::kWarning, "ranks", warning, "docs/communication.md says what each backend needs");
  if (!report.backend.empty())
    findings.add("backend", str(report.backend, " on ", report.device, ", ", report.num_ranks,
                                report.num_ranks == 1 ? " rank" : " ranks"));
  judge_links(findings, report);
}

}  // namespace

double algorithm_bandwidth(const CollectiveTiming& timing) {
  return timing.seconds > 0 ? static_cast<double>(timing.bytes) / timing.seconds : 0;
}

double bus_bandwidth(const CollectiveTiming& timing, int num_ranks) {
  const double part = num_ranks > 1 ? static_cast<double>(num_ranks - 1) / num_ranks : 1;
  const double factor = timing.name == "all_reduce" ? 2 * part : timing.name == "broadcast" ? 1 : part;
  return algorithm_bandwidth(timing) * factor;
}

const char* name_of(Level level) {
  return level == Level::kOk ? "ok" : level == Level::kWarning ? "warning" : "problem";
}

std::vector<Finding> judge(const DoctorReport& report) {
  std::vector<Finding> findings;
  for (const HostReport& host : report.hosts) judge_host(findings, host, report);
  judge_group(findings, report);
  return findings;
}

int count(const std::vector<Finding>& findings, Level level) {
  return static_cast<int>(std::count_if(findings.begin(), findings.end(),
                                        [&](const Finding& finding) { return finding.level == level; }));
}

std::string advice_for_unreachable(const std::string& host, const std::string& reason) {
  const auto says = [&](const char* text) { return reason.find(text) != reason.npos; };
  if (says("resolve")) return "correct the name in the hostfile, or add it to /etc/hosts or the DNS";
  if (says("Permission denied")) return str("give ", host, " this user's key: ssh-copy-id ", host);
  if (says("Host key verification")) return str("log in once by hand, to accept the host's key: ssh ", host);
  if (says("refused")) return "start sshd there, or give its port with --ssh-port";
  if (says("timed out") || says("No route") || says("unreachable"))
    return "switch the host on, and let firewalls pass ssh";
  if (says("No such file") || says("not found") || says("can't cd"))
    return "Tessera and the working directory have to be there at the same paths as here";
  return str("ssh -o BatchMode=yes ", host, " true has to work without a question");
}

}  // namespace tessera::tools

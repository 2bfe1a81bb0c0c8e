#include "tools/doctor/doctor_facts.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <ifaddrs.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <torch/version.h>
#include <unistd.h>

#include <ATen/ATen.h>
#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>

#include "checkpoint/block_hashes.h"
#include "comm/nccl/nccl_plugin.h"
#include "comm/rendezvous/network.h"
#include "core/cuda_plugin.h"
#include "core/error.h"
#include "core/files/file_descriptor.h"
#include "core/memory/available_memory.h"
#include "core/str.h"
#include "core/variables.h"
#include "launcher/environment/host.h"
#include "launcher/failure/failure_report.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

int64_t total_memory() { return int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE); }

void find_shm(HostFacts& facts) {
  struct statvfs shm{};
  if (::statvfs("/dev/shm", &shm) != 0) return;
  facts.shm = static_cast<int64_t>(shm.f_blocks * shm.f_frsize);
  facts.free_shm = static_cast<int64_t>(shm.f_bavail * shm.f_frsize);
}

void find_open_files(HostFacts& facts) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  if (limit.rlim_max != RLIM_INFINITY) facts.open_files = static_cast<int64_t>(limit.rlim_max);
}

/// "550.54.15" of "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar ...".
std::string driver_version() {
  std::istringstream words(first_line("/proc/driver/nvidia/version"));
  for (std::string word; words >> word;)
    if (word.find('.') != word.npos && word.find_first_not_of("0123456789.") == word.npos) return word;
  return fs::exists("/dev/nvidiactl") ? "unknown" : "";
}

/// NCCL's own number: 22809 is 2.28.9.
std::string nccl_version() {
  void* const symbol = ::dlsym(RTLD_DEFAULT, "ncclGetVersion");
  int number = 0;
  if (!symbol || reinterpret_cast<int (*)(int*)>(symbol)(&number) != 0) return "unknown";
  return str(number / 10000, ".", number / 100 % 100, ".", number % 100);
}

void find_gpus(HostFacts& facts) {
  facts.driver = driver_version();
  if (facts.driver.empty()) {
    facts.no_gpu = "no NVIDIA driver";
    return;
  }
  try {
    facts.gpus = TESSERA_RESOLVE(tessera_cuda_num_devices)();
    facts.nccl = nccl_version();
    if (facts.gpus == 0)
      facts.no_gpu = str("driver ", facts.driver, ", but no device (CUDA_VISIBLE_DEVICES, nvidia-smi)");
  } catch (const Error& error) {
    facts.no_gpu = error.what();
  }
}

/// Returns the version of the libtorch that is loaded, as its wheel says; else the one this was built for.
std::string torch_version() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&at::globalContext), &info) != 0 && info.dli_fname) {
    std::ifstream file(fs::path(info.dli_fname).parent_path().parent_path() / "version.py");
    for (std::string line; std::getline(file, line);)
      if (const size_t quote = line.find('\''); line.starts_with("__version__") && quote != line.npos)
        return line.substr(quote + 1, line.rfind('\'') - quote - 1);
  }
  return TORCH_VERSION;
}

std::string build_of_this_program() {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  return str(TESSERA_VERSION, " (", checkpoint::text_digest(bytes).substr(0, 8), ")");
}

using Interfaces = std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)>;

/// The interface that has this address; "": none.
std::string interface_with(const std::string& address) {
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) return "";
  const Interfaces all(found, &::freeifaddrs);
  for (const ifaddrs* one = found; one; one = one->ifa_next) {
    if (!one->ifa_addr) continue;
    char text[INET6_ADDRSTRLEN] = "";
    if (one->ifa_addr->sa_family == AF_INET)
      ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr, text,
                  sizeof(text));
    else if (one->ifa_addr->sa_family == AF_INET6)
      ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr, text,
                  sizeof(text));
    if (address == text) return one->ifa_name;
  }
  return "";
}

/// Asks the kernel by a socket, because /sys may be that of another network namespace. A driver need not know
/// the speed.
void find_link(HostReport& host) {
  if (host.interface.empty() || host.interface.size() >= IFNAMSIZ) return;
  const FileDescriptor socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  std::memcpy(request.ifr_name, host.interface.data(), host.interface.size());
  if (::ioctl(socket.get(), SIOCGIFMTU, &request) == 0) host.mtu = request.ifr_mtu;
  ethtool_cmd settings{};
  settings.cmd = ETHTOOL_GSET;
  request.ifr_data = reinterpret_cast<char*>(&settings);
  if (::ioctl(socket.get(), SIOCETHTOOL, &request) != 0) return;
  const auto megabits = ethtool_cmd_speed(&settings);
  if (megabits != static_cast<__u32>(SPEED_UNKNOWN)) host.link_bits_per_s = int64_t{megabits} * 1'000'000;
}

}  // namespace

HostFacts host_facts() {
  HostFacts facts;
  facts.name = launcher::node_name();
  facts.cores = launcher::available_cores();
  facts.machine_cores = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  facts.memory = total_memory();
  facts.free_memory = available_memory();
  facts.memory_limit = memory_limit();
  find_shm(facts);
  find_open_files(facts);
  find_gpus(facts);
  facts.torch = torch_version();
  facts.build = build_of_this_program();
  return facts;
}

void find_network(HostReport& host, const std::string& master_addr, int master_port, bool is_cuda) {
  const char* const variable = is_cuda ? "NCCL_SOCKET_IFNAME" : "GLOO_SOCKET_IFNAME";
  const auto named = text_variable(variable);
  try {
    if (named) {
      const std::string first = named->substr(0, named->find(','));
      host.chosen_by = variable;
      host.address = comm::address_of_interface(first, variable);
      host.interface = first;
    } else {
      host.address = comm::address_towards(master_addr, master_port);
      host.interface = interface_with(host.address);
      host.chosen_by = str("route to ", master_addr);
    }
  } catch (const CommError& error) {
    host.chosen_by = error.what();
    return;
  }
  find_link(host);
}

}  // namespace tessera::tools

// What `tessera doctor` finds out: facts about the hosts of a run and about its ranks as a group. Plain
// values, with a JSON form in which they go from the ranks to the command.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera::tools {

/// Has the facts of one host. Sizes are bytes.
struct HostFacts {
  std::string name = {};
  int cores = 1;          ///< that this process may use: affinity and the control group's quota
  int machine_cores = 1;  ///< that are online
  int64_t memory = 0, free_memory = 0;
  int64_t memory_limit = -1;        ///< of the control groups; -1: none
  int64_t shm = -1, free_shm = -1;  ///< /dev/shm; -1: it is not there
  int64_t open_files = -1;          ///< ulimit -H -n, to which ranks raise their limit; -1: no limit
  int gpus = 0;
  std::string driver = {}, no_gpu = {};  ///< of NVIDIA; why there is no GPU
  std::string nccl = {};                 ///< version, "" without GPUs
  std::string torch = {}, build = {};  ///< libtorch's version; Tessera's version and a digest of the program

  bool operator==(const HostFacts&) const = default;
};

/// How a host takes part.
struct HostReport {
  std::string name = {};
  int num_ranks = 1;
  std::string unreachable = {};  ///< why; "": it was reached
  bool has_facts = false;
  HostFacts facts = {};
  std::string address = {}, interface = {}, chosen_by = {};  ///< of the network between ranks; "": unknown
  int64_t link_bits_per_s = 0;                               ///< 0: the driver does not say
  int mtu = 0;
  bool has_clock = false;
  double clock_s = 0;        ///< this clock less that of rank 0's host
  double clock_error_s = 0;  ///< by which that is wrong at most

  bool operator==(const HostReport&) const = default;
};

struct CollectiveTiming {
  std::string name;
  int64_t bytes = 0;   ///< of the whole buffer, as in nccl-tests
  double seconds = 0;  ///< of one, on the slowest rank

  bool operator==(const CollectiveTiming&) const = default;
};

struct DoctorReport {
  std::vector<HostReport> hosts;
  int num_ranks = 1;
  std::string backend, device;        ///< "": the ranks have not met
  std::string no_group;               ///< why they have not
  std::vector<std::string> warnings;  ///< of the ranks
  std::vector<CollectiveTiming> collectives;

  bool operator==(const DoctorReport&) const = default;
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HostFacts, name, cores, machine_cores, memory, free_memory, memory_limit,
                                   shm, free_shm, open_files, gpus, driver, no_gpu, nccl, torch, build)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HostReport, name, num_ranks, unreachable, has_facts, facts, address,
                                   interface, chosen_by, link_bits_per_s, mtu, has_clock, clock_s,
                                   clock_error_s)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CollectiveTiming, name, bytes, seconds)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DoctorReport, hosts, num_ranks, backend, device, no_group, warnings,
                                   collectives)

/// Bytes a second that the buffer was worked on with.
double algorithm_bandwidth(const CollectiveTiming& timing);
/// The same times the part of the buffer that a rank has to send or receive, so that it can be
/// compared with the speed of a link and is the same for any number of ranks: the "bus bandwidth" of
/// nccl-tests (doc/PERFORMANCE.md, NVIDIA).
double bus_bandwidth(const CollectiveTiming& timing, int num_ranks);

}  // namespace tessera::tools

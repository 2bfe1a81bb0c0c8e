#include "tools/doctor/doctor_group.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>

#include "comm/init/init.h"
#include "comm/rendezvous/network.h"
#include "core/json/json_reader.h"
#include "core/json/json_text.h"
#include "core/str.h"
#include "tools/doctor/doctor_facts.h"

namespace tessera::tools {
namespace {

using comm::Communicator;
using nlohmann::json;

constexpr int64_t kSizes[] = {4 << 10, 256 << 10, 32 << 20};
constexpr double kSecondsEach = 0.25;  ///< that a collective of one size is repeated for
constexpr auto kRendezvous = std::chrono::seconds(30);
constexpr auto kCollective = std::chrono::seconds(60);

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
/// What logs are written with, and hosts compare.
double wall_clock_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// The device has done what was asked of it.
void finish(Communicator& comm, const at::Tensor& buffer) {
  if (!comm.wait_blocks()) buffer.narrow(0, 0, 1).item<float>();
}

double slowest(Communicator& comm, double seconds) {
  const std::vector<double> all = comm.exchange(seconds, "doctor: seconds");
  return *std::max_element(all.begin(), all.end());
}

/// Seconds of one call of `collective` on the slowest rank.
double time_of(Communicator& comm, const at::Tensor& buffer,
               const std::function<comm::WorkPtr()>& collective) {
  const auto run = [&](int times) {
    comm.barrier("doctor: start");
    const double start = seconds_now();
    for (int i = 0; i < times; ++i) collective()->wait();
    finish(comm, buffer);
    return slowest(comm, seconds_now() - start) / times;
  };
  run(2);  // connections, first touch of memory
  const double one = run(2);
  return run(static_cast<int>(std::clamp(kSecondsEach / std::max(one, 1e-7), 3.0, 1000.0)));
}

std::vector<CollectiveTiming> time_collectives(Communicator& comm) {
  std::vector<CollectiveTiming> timings;
  const int64_t unit = int64_t{comm.size()} * 4;
  const at::Tensor memory =
      comm.allocate_symmetric(kSizes[2] / unit * unit, comm.device(), "doctor: buffer").view(at::kFloat);
  memory.zero_();
  for (const int64_t size : kSizes) {
    const int64_t bytes = std::max<int64_t>(1, size / unit) * unit;
    const at::Tensor full = memory.narrow(0, 0, bytes / 4);
    const at::Tensor shard = full.narrow(0, comm.rank() * (bytes / unit), bytes / unit);
    const std::pair<const char*, std::function<comm::WorkPtr()>> collectives[] = {
        {"all_gather", [&] { return comm.all_gather(full, shard, "doctor: all_gather"); }},
        {"reduce_scatter", [&] { return comm.reduce_scatter(full, "doctor: reduce_scatter"); }},
        {"all_reduce", [&] { return comm.all_reduce(full, "doctor: all_reduce"); }},
        {"broadcast", [&] { return comm.broadcast(full, 0, "doctor: broadcast"); }}};
    for (const auto& [name, collective] : collectives)
      timings.push_back({name, bytes, time_of(comm, full, collective)});
  }
  return timings;
}

/// A rank's clock when it leaves a barrier, and for how long it was in there.
struct Reading {
  double clock = 0, waited = 0;
};

/// Reads each rank's clock at one moment. The moments differ by at most the longest time that a rank was in
/// the barrier: all leave it after the last one has come. The first barrier brings the ranks together.
std::vector<Reading> read_clocks(Communicator& comm) {
  comm.barrier("doctor: clocks, ready");
  const double start = seconds_now();
  comm.barrier("doctor: clocks");
  const std::vector<double> mine = {wall_clock_now(), seconds_now() - start};
  std::vector<Reading> readings;
  for (const std::vector<double>& one : comm.exchange(mine, "doctor: clocks"))
    readings.push_back({one.at(0), one.at(1)});
  return readings;
}

/// What each rank tells the others.
json introduction(const Communicator& comm, const Environment& env) {
  HostReport host;
  find_network(host, env.master_addr, env.master_port, comm.device().is_cuda());
  return {{"domain", comm::loopback_domain()}, {"host", host}};
}

/// The hosts in the order of their first ranks, which are stored in `first_ranks`.
std::vector<HostReport> hosts_of(const std::vector<json>& ranks, std::vector<int>& first_ranks) {
  std::vector<HostReport> hosts;
  std::map<std::string, size_t> known;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto [place, is_new] = known.emplace(ranks[rank].at("domain").get<std::string>(), hosts.size());
    if (is_new) {
      hosts.push_back(ranks[rank].at("host"));
      hosts.back().num_ranks = 0;
      first_ranks.push_back(static_cast<int>(rank));
    }
    ++hosts[place->second].num_ranks;
  }
  return hosts;
}

}  // namespace

std::optional<DoctorReport> examine_group() {
  const Environment env = environment();
  comm::JoinOptions options{.device = "auto", .timeout = kCollective, .rendezvous_timeout = kRendezvous};
  options.log = Logger(LogOptions{});
  const comm::CommunicatorPtr comm = comm::join(options, env);
  std::vector<json> ranks;
  for (const std::string& text : comm->exchange(json_text(introduction(*comm, env)), "doctor: ranks"))
    ranks.push_back(parse_json(text));
  DoctorReport report;
  std::vector<int> first_ranks;
  report.hosts = hosts_of(ranks, first_ranks);
  const bool is_first = std::find(first_ranks.begin(), first_ranks.end(), comm->rank()) != first_ranks.end();
  const auto facts = comm->exchange(is_first ? json_text(json(host_facts())) : "", "doctor: facts");
  report.num_ranks = comm->size();
  report.backend = comm->backend();
  report.device = comm->device().is_cuda() ? "GPUs" : "CPUs";
  const std::vector<Reading> clocks = read_clocks(*comm);
  double error = 0;
  for (const Reading& one : clocks) error = std::max(error, one.waited);
  for (size_t i = 0; i < report.hosts.size(); ++i) {
    HostReport& host = report.hosts[i];
    host.facts = parse_json(facts[static_cast<size_t>(first_ranks[i])]);
    host.has_facts = true;
    host.name = host.facts.name;
    if (i == 0) continue;
    host.has_clock = true;
    host.clock_s = clocks[static_cast<size_t>(first_ranks[i])].clock - clocks[0].clock;
    host.clock_error_s = error;
  }
  if (comm->size() > 1) report.collectives = time_collectives(*comm);
  if (comm->rank() != 0) return std::nullopt;
  return report;
}

}  // namespace tessera::tools

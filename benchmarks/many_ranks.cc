// What grows with the number of ranks. Processes of this machine, which have a small model, join, exchange,
// reduce, train, save, and lose one of them; half as many then load what was saved, and it is consolidated.
//   many_ranks --ranks 16 64 256 --host-ranks 16
//   many_ranks --way c10d --ranks 16 64 256
//
// It is to be run in a network of its own (unshare --net): c10d asks for the name of each address that it
// connects to, and a name server that drops one of a thousand questions costs that rank 5 s.
//
// All ranks share the cores of one machine, so a time says how the whole work of all ranks grows, and not how
// long it takes on a cluster. Each `--host-ranks` of them are a host: shared memory among them, Gloo over the
// loopback interface to the others. `c10d` does what it can of the same with PyTorch's own classes: a
// TCPStore, a ProcessGroupGloo of all ranks, an all-gather of small values, an all-reduce, the loss of a
// rank.
//
// A line of JSON for each number of ranks. Times are of the slowest rank, in seconds; the others are of the
// rank that has most, of rank 0 where the name says so:
//   join_s, exchange_s (of 64 bytes a rank), reduce_s (all-reduce of 1 MiB), train_s (two steps at stage 3),
//   save_s, notice_s (from SIGKILL until a rank has the error), load_s, consolidate_s
//   named           ranks whose error names the rank that was killed
//   cpu_s           of all ranks together, until the last one had joined
//   sent, received  bytes of the connections to the store after joining; segments: about its requests
//   exchange_…      the same of each exchange
//   sockets, files  that are open after joining
//   private_mib     memory that the rank shares with nobody after joining; trained_mib: after training
#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <c10/util/Logging.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "checkpoint/consolidate/convert_checkpoint.h"
#include "comm/init/given_machine.h"
#include "comm/init/init.h"
#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "core/str.h"
#include "engine/checkpointing.h"
#include "engine/config/parse.h"
#include "engine/engine.h"
#include "examples/language_model/model.h"

namespace tessera::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;

/// Of PyTorch's collectives (30 min by default): most of its ranks notice nothing else of one that has ended.
constexpr std::chrono::seconds kC10dLimit{30};
constexpr int kExchanges = 5;
constexpr int kReductions = 3;
constexpr int64_t kReducedNumel = 1 << 18;  // 1 MiB of floats

enum class Phase { kJoin, kExchange, kReduce, kTrain, kSave, kNotice, kEnd, kNumPhases };
constexpr auto kNumPhases = static_cast<size_t>(Phase::kNumPhases);

/// Traffic of this process's connections to the store, and what it has open.
struct Connections {
  int64_t sent = 0, received = 0, segments = 0, sockets = 0, files = 0;
};

struct RankReport {
  std::array<double, kNumPhases> seconds;  ///< by phase
  std::array<Connections, kNumPhases> connections;
  double private_mib, trained_mib, cpu_s;
  bool named;
  std::array<char, 400> error;  ///< empty: none but the expected one
};

/// Is shared by all processes. A rank begins a phase once all have ended the one before.
struct Shared {
  std::atomic<int> phase;  ///< that ranks may begin
  std::array<std::atomic<int>, kNumPhases> num_ended;
  std::atomic<int> num_failed;
  std::atomic<int64_t> killed_at;  ///< Clock's count
  RankReport* reports() { return reinterpret_cast<RankReport*>(this + 1); }
};

struct Run {
  int num_ranks = 1, host_ranks = 16, port = 0;
  bool is_c10d = false, loads = false;
  std::string folder;  ///< of checkpoints
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Connections connections(int store_port) {
  Connections found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename().string());
    ++found.files;
    sockaddr_in peer{};
    socklen_t length = sizeof peer;
    int kind = 0;
    socklen_t kind_length = sizeof kind;
    if (::getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &kind_length) != 0) continue;
    ++found.sockets;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) continue;
    // An IPv6 socket has its port at the same place.
    if ((peer.sin_family != AF_INET && peer.sin_family != AF_INET6) || ntohs(peer.sin_port) != store_port)
      continue;
    tcp_info info{};
    length = sizeof info;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
    found.sent += static_cast<int64_t>(info.tcpi_bytes_acked);
    found.received += static_cast<int64_t>(info.tcpi_bytes_received);
    found.segments += info.tcpi_data_segs_out;
  }
  return found;
}

double private_mib() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  double kib = 0;
  for (std::string line; std::getline(rollup, line);)
    if (line.starts_with("Private_")) kib += std::stod(line.substr(line.find(':') + 1));
  return kib / 1024;
}

double cpu_seconds() {
  rusage use{};
  ::getrusage(RUSAGE_SELF, &use);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

/// Takes one rank through the phases. `act` returns when the rank has done its part.
class RankPhases {
 public:
  RankPhases(Shared& shared, const Run& run, int rank)
      : shared_(shared), run_(run), report_(shared.reports()[rank]) {}

  void take(Phase phase, const std::function<void()>& act) {
    const auto number = static_cast<size_t>(phase);
    while (shared_.phase.load() < static_cast<int>(number)) {
      if (::getppid() == 1) ::_exit(1);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const auto start = Clock::now();
    act();
    report_.seconds[number] = seconds_since(
        phase == Phase::kNotice ? Clock::time_point(Clock::duration(shared_.killed_at.load())) : start);
    if (phase == Phase::kJoin) {
      report_.cpu_s = cpu_seconds();
      report_.private_mib = private_mib();
    }
    if (phase == Phase::kTrain) report_.trained_mib = private_mib();
    if (phase <= Phase::kExchange) report_.connections[number] = connections(run_.port);
    shared_.num_ended[number].fetch_add(1);
  }

  /// Until this process is ended: what the rank has made stays.
  void stay() {
    take(Phase::kEnd, [] {});
  }

  /// The rank that is killed never comes back from it.
  void expect_loss(int lost, const std::function<void()>& act) {
    take(Phase::kNotice, [&] {
      try {
        while (true) act();
      } catch (const std::exception& error) {
        report_.named = std::string(error.what()).find(str("rank ", lost, ' ')) != std::string::npos;
      }
    });
  }

 private:
  Shared& shared_;
  const Run& run_;
  RankReport& report_;
};

/// The model's parameters are a few thousand, so that what is measured is what ranks cost.
EngineConfig small_config() {
  EngineConfig config;
  config.train_micro_batch_size_per_gpu = 1;
  config.optimizer.options = AdamWOptions{.lr = 1e-3};
  config.zero.stage = 3;
  config.checkpoint.fsync = false;
  return config;
}
const GptOptions kShape{.dim = 32, .layers = 2, .heads = 2, .vocabulary = 64, .sequence = 16};

void tessera_rank(const Run& run, int rank, RankPhases& phases) {
  Environment env;
  env.rank = rank;
  env.world_size = run.num_ranks;
  env.local_rank = rank % run.host_ranks;
  env.local_world_size = std::min(run.host_ranks, run.num_ranks);
  env.master_port = run.port;
  env.run_secret = "a secret of this benchmark's ranks";
  comm::JoinOptions options;
  options.backend = "hybrid";
  const comm::GivenMachine machine{.host = [&](int of) { return str("host ", of / run.host_ranks); },
                                   .transfer = {}};
  comm::CommunicatorPtr group;
  phases.take(Phase::kJoin, [&] { group = comm::join(options, env, machine); });
  at::manual_seed(1);
  Gpt model(kShape);
  if (run.loads) {
    decltype(initialize(model, small_config(), group)) engine;
    phases.take(Phase::kTrain, [&] { engine = initialize(model, small_config(), group); });
    phases.take(Phase::kSave, [&] { engine->load_checkpoint(run.folder); });
    return phases.stay();
  }
  phases.take(Phase::kExchange, [&] {
    for (int i = 0; i < kExchanges; ++i) group->exchange(std::string(64, 'x'), "values");
  });
  at::Tensor numbers = at::ones({kReducedNumel});
  phases.take(Phase::kReduce, [&] {
    for (int i = 0; i < kReductions; ++i) group->all_reduce(numbers, "numbers")->wait();
  });
  decltype(initialize(model, small_config(), group)) engine;
  phases.take(Phase::kTrain, [&] {
    engine = initialize(model, small_config(), group);
    for (int i = 0; i < 2; ++i) {
      const at::Tensor tokens = at::randint(kShape.vocabulary, {1, kShape.sequence}, at::kLong);
      engine->backward(engine->forward(tokens, tokens));
      engine->step();
    }
  });
  phases.take(Phase::kSave, [&] { engine->save_checkpoint(run.folder); });
  phases.expect_loss(run.num_ranks - 1, [&] { group->all_reduce(numbers, "numbers")->wait(); });
  phases.stay();
}

void c10d_rank(const Run& run, int rank, RankPhases& phases) {
  ::signal(SIGPIPE, SIG_IGN);
  FLAGS_caffe2_log_level = c10::GLOG_ERROR;  // it warns of each connection whose name it cannot find
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
  phases.take(Phase::kJoin, [&] {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(run.port);
    options.isServer = rank == 0;
    options.numWorkers = static_cast<std::size_t>(run.num_ranks);
    store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    auto group_options = c10d::ProcessGroupGloo::Options::create(kC10dLimit);
    group_options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    group = c10::make_intrusive<c10d::ProcessGroupGloo>(
        c10::make_intrusive<c10d::PrefixStore>("group", store), rank, run.num_ranks, group_options);
    group->barrier()->wait();
  });
  phases.take(Phase::kExchange, [&] {
    for (int i = 0; i < kExchanges; ++i) {
      std::vector<at::Tensor> mine{at::ones({16})};
      std::vector<std::vector<at::Tensor>> all(1);
      for (int r = 0; r < run.num_ranks; ++r) all[0].push_back(at::ones({16}));
      group->allgather(all, mine)->wait();
    }
  });
  std::vector<at::Tensor> numbers{at::ones({kReducedNumel})};
  phases.take(Phase::kReduce, [&] {
    for (int i = 0; i < kReductions; ++i) group->allreduce(numbers)->wait();
  });
  phases.expect_loss(run.num_ranks - 1, [&] { group->allreduce(numbers)->wait(); });
  phases.stay();
}

[[noreturn]] void rank_main(Shared& shared, const Run& run, int rank) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  at::set_num_threads(1);
  RankPhases phases(shared, run, rank);
  try {
    run.is_c10d ? c10d_rank(run, rank, phases) : tessera_rank(run, rank, phases);
  } catch (const std::exception& error) {
    std::strncpy(shared.reports()[rank].error.data(), error.what(), shared.reports()[rank].error.size() - 1);
    shared.num_failed.fetch_add(1);
    ::_exit(1);
  }
  ::_exit(0);  // the groups of ranks that have lost one are not ended in order
}

/// Owns the ranks, which end with it.
class Ranks {
 public:
  explicit Ranks(const Run& run) : run_(run), bytes_(sizeof(Shared) + run.num_ranks * sizeof(RankReport)) {
    void* const memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw Error("no memory that processes share");
    shared_ = new (memory) Shared;
    shared_->phase = -1;
    for (int rank = 0; rank < run.num_ranks; ++rank) {
      const pid_t pid = ::fork();
      if (pid == 0) rank_main(*shared_, run_, rank);
      if (pid < 0) throw Error("no process for rank ", rank);
      pids_.push_back(pid);
    }
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  ~Ranks() {
    for (const pid_t pid : pids_) ::kill(pid, SIGKILL);
    for (const pid_t pid : pids_) ::waitpid(pid, nullptr, 0);
    ::munmap(shared_, bytes_);
  }

  void take(Phase phase, bool kills_last = false) {
    const auto number = static_cast<size_t>(phase);
    shared_->phase = static_cast<int>(number);
    if (kills_last) {
      std::this_thread::sleep_for(std::chrono::seconds(2));
      shared_->killed_at = Clock::now().time_since_epoch().count();
      ::kill(pids_.back(), SIGKILL);
      ::waitpid(pids_.back(), nullptr, 0);
      pids_.pop_back();
    }
    while (shared_->num_ended[number].load() < static_cast<int>(pids_.size())) {
      if (shared_->num_failed.load() > 0) fail();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  /// The most of what `value` gives of a rank that is there.
  double most(const std::function<double(const RankReport&)>& value) const {
    double most = 0;
    for (size_t rank = 0; rank < pids_.size(); ++rank) most = std::max(most, value(shared_->reports()[rank]));
    return most;
  }
  double seconds(Phase phase) const {
    return most([&](const RankReport& report) { return report.seconds[static_cast<size_t>(phase)]; });
  }
  double sum(const std::function<double(const RankReport&)>& value) const {
    double sum = 0;
    for (size_t rank = 0; rank < pids_.size(); ++rank) sum += value(shared_->reports()[rank]);
    return sum;
  }
  const RankReport& first() const { return shared_->reports()[0]; }

 private:
  [[noreturn]] void fail() const {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    for (int rank = 0; rank < run_.num_ranks; ++rank)
      if (const char* error = shared_->reports()[rank].error.data(); *error != '\0')
        throw Error("rank ", rank, ": ", error);
    throw Error("a rank has failed");
  }

  const Run run_;
  const size_t bytes_;
  Shared* shared_ = nullptr;
  std::vector<pid_t> pids_;
};

double consolidate(const std::string& folder) {
  const auto start = Clock::now();
  checkpoint::ConvertOptions options{.target = checkpoint::ConvertTarget::kSafetensors};
  options.directory = folder;
  options.output = folder + "/model.safetensors";
  options.disk.sync = false;
  checkpoint::convert_checkpoint(options);
  return seconds_since(start);
}

nlohmann::json measure(Run run) {
  nlohmann::json row{{"ranks", run.num_ranks}};
  const TemporaryFolder folder("tessera_many_ranks");
  run.folder = folder.path().string();
  {
    Ranks ranks(run);
    for (const Phase phase : {Phase::kJoin, Phase::kExchange, Phase::kReduce}) ranks.take(phase);
    row["join_s"] = ranks.seconds(Phase::kJoin);
    row["exchange_s"] = ranks.seconds(Phase::kExchange) / kExchanges;
    row["reduce_s"] = ranks.seconds(Phase::kReduce) / kReductions;
    row["cpu_s"] = ranks.sum([](const RankReport& report) { return report.cpu_s; });
    row["private_mib"] = ranks.most([](const RankReport& report) { return report.private_mib; });
    const auto of_join = [](const RankReport& report) { return report.connections[0]; };
    const auto of_exchange = [](const RankReport& report) { return report.connections[1]; };
    row["sent"] = ranks.most([&](const RankReport& r) { return of_join(r).sent; });
    row["received"] = ranks.most([&](const RankReport& r) { return of_join(r).received; });
    row["segments"] = ranks.most([&](const RankReport& r) { return of_join(r).segments; });
    row["exchange_received"] = ranks.most([&](const RankReport& r) {
      return static_cast<double>(of_exchange(r).received - of_join(r).received) / kExchanges;
    });
    row["exchange_segments"] = ranks.most([&](const RankReport& r) {
      return static_cast<double>(of_exchange(r).segments - of_join(r).segments) / kExchanges;
    });
    row["sockets"] = ranks.most([&](const RankReport& r) { return r.connections[1].sockets; });
    row["rank_0_files"] = ranks.first().connections[1].files;
    if (!run.is_c10d) {
      for (const Phase phase : {Phase::kTrain, Phase::kSave}) ranks.take(phase);
      row["train_s"] = ranks.seconds(Phase::kTrain);
      row["save_s"] = ranks.seconds(Phase::kSave);
      row["trained_mib"] = ranks.most([](const RankReport& report) { return report.trained_mib; });
    }
    ranks.take(Phase::kNotice, /*kills_last=*/true);
    row["notice_s"] = ranks.seconds(Phase::kNotice);
    row["named"] = ranks.sum([](const RankReport& report) { return report.named ? 1 : 0; });
  }
  if (run.is_c10d) return row;
  row["consolidate_s"] = consolidate(run.folder);
  run.loads = true;
  run.num_ranks /= 2;
  ++run.port;
  Ranks ranks(run);
  for (const Phase phase : {Phase::kJoin, Phase::kTrain, Phase::kSave}) ranks.take(phase);
  row["load_s"] = ranks.seconds(Phase::kSave);
  return row;
}

int run_benchmark(int argc, char** argv) {
  CLI::App app("What grows with the number of ranks");
  std::vector<int> numbers{16, 64, 256};
  std::string way = "tessera";
  Run run;
  run.port = 29800;
  app.add_option("--ranks", numbers)->check(CLI::Range(2, 4096));
  app.add_option("--host-ranks", run.host_ranks, "Ranks of a host")->check(CLI::PositiveNumber);
  app.add_option("--way", way)->check(CLI::IsMember({"tessera", "c10d"}));
  app.add_option("--port", run.port, "Of the first run; the next ones take the next ones");
  CLI11_PARSE(app, argc, argv);
  run.is_c10d = way == "c10d";
  for (const int number : numbers) {
    run.num_ranks = number;
    std::cout << measure(run).dump() << std::endl;
    run.port += 2;
  }
  return 0;
}

}  // namespace
}  // namespace tessera::benchmarks

int main(int argc, char** argv) try {
  return tessera::benchmarks::run_benchmark(argc, argv);
} catch (const std::exception& error) {
  std::cerr << "many_ranks: " << error.what() << '\n';
  return 1;
}

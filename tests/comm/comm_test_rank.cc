// One rank as a process of its own, for tests that kill, delay or misconfigure ranks:
//   comm_test_rank serve     forks ranks that do the following (rank_server.h)
//   comm_test_rank sum       joins, adds up once, prints "sum S backend B"
//   comm_test_rank sums      joins, adds up TEST_SUMS times, checks each sum, prints the seconds it took
//   comm_test_rank loop      adds up until something fails; prints "running" after the first time
//   comm_test_rank device_loop  the same on the device of the communicator, reading each sum
//   comm_test_rank exchange  exchanges texts many times, then leaves at once
//   comm_test_rank bits      all collectives of numbers that are the same in every run; prints "bits HASH" of
//                            what this rank gets
//   comm_test_rank fail      joins, then rank 1 ends by an error of its own while the others add up
//   comm_test_rank stream    rank 1 is killed while the others wait in a stream, which a StreamTransport has
//   comm_test_rank needs_rank_0_to_leave  the others stay until rank 0 has left and written TEST_FILE
//   comm_test_rank wait WHAT joins; the others call WHAT and wait for rank TEST_VICTIM, which is killed by
//                            SIGKILL after kMoment
// TEST_HOSTS is a letter a rank: ranks with different ones share no memory, as if on different hosts.
// TEST_VERSION makes it a rank of another release, with that version of what ranks say to each other.
// TEST_NUMEL is the length of what is added up, TEST_VERIFY=1 sets JoinOptions::verify, TEST_PAUSE_MS is a
// pause before each sum of `loop`. TEST_RENDEZVOUS_MS and TEST_TIMEOUT_MS set the timeouts, TEST_BACKEND the
// backend (the device of "staged" is host memory unless TEST_DEVICE is cuda), TEST_LOG=1 shows the log,
// TEST_KIND=1 shows the kind of an
// error, TEST_NOFILE limits the files that may be open, TEST_NO_LOOPBACK=1 goes to a network namespace whose
// loopback interface is down. A tessera::Error is printed as "error: LINE"; exit code 3.
#include <ATen/ATen.h>

#include <sched.h>
#include <signal.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "comm/init/given_machine.h"
#include "comm/init/transport_communicator.h"
#include "comm/rendezvous/rendezvous.h"
#include "core/peer_failure.h"
#include "core/str.h"
#include "tests/comm/rank_server.h"
#include "tests/comm/run_ranks.h"
#include "tests/comm/stream_transport.h"

namespace {

using tessera::comm::CommunicatorPtr;

std::chrono::milliseconds setting(const char* name, int fallback) {
  const char* value = std::getenv(name);
  return std::chrono::milliseconds(value != nullptr ? std::atoi(value) : fallback);
}

void say(const std::string& line) {
  std::puts(line.c_str());
  std::fflush(stdout);
}

/// After this time the others wait.
constexpr std::chrono::milliseconds kMoment{500};

[[noreturn]] void be_killed() {
  std::this_thread::sleep_for(kMoment);
  raise(SIGKILL);
  std::abort();
}

/// What all ranks but the victim do.
void wait_for_all(const std::string& what, const CommunicatorPtr& comm) {
  const int64_t shard = 1 << 14, numel = shard * comm->size();
  const at::Tensor buffer = at::ones({numel});
  if (what == "all_gather")
    comm->all_gather(buffer, buffer.narrow(0, comm->rank() * shard, shard), "waited for")->wait();
  if (what == "reduce_scatter") comm->reduce_scatter(buffer, "waited for")->wait();
  if (what == "all_reduce") comm->all_reduce(buffer, "waited for")->wait();
  if (what == "broadcast")
    comm->broadcast(buffer, std::atoi(std::getenv("TEST_VICTIM")), "waited for")->wait();
  if (what == "barrier") comm->barrier("waited for");
  if (what == "exchange") comm->exchange("", "waited for");
  if (what == "duplicate") comm->duplicate("waited for");
  if (what == "allocate_symmetric") comm->allocate_symmetric(1 << 16, at::kCPU, "waited for");
  if (what == "allocate_shared") comm->allocate_shared(1 << 16, "waited for");
}

/// A victim ends in the middle of joining, or after it.
CommunicatorPtr join(const std::string& what, const tessera::comm::Environment& environment,
                     const tessera::comm::JoinOptions& options, const tessera::comm::GivenMachine& given) {
  if (const char* version = std::getenv("TEST_VERSION")) {
    tessera::comm::Settings settings = tessera::comm::settings_of(options, at::kCPU);
    settings[tessera::comm::kVersionSetting] = version;
    tessera::comm::rendezvous(environment, options, settings);
  }
  const char* victim = std::getenv("TEST_VICTIM");
  if (victim == nullptr || std::atoi(victim) != environment.rank)
    return tessera::comm::join(options, environment, given);
  if (what == "rendezvous") std::thread(be_killed).detach();
  if (what == "connecting") {
    tessera::comm::rendezvous(environment, options, tessera::comm::settings_of(options, at::kCPU));
    be_killed();
  }
  const CommunicatorPtr comm = tessera::comm::join(options, environment, given);
  be_killed();
}

/// What a rank on a GPU does: it issues a collective, waits for the device, and goes on.
void wait_in_stream(const tessera::comm::Environment& environment,
                    const tessera::comm::JoinOptions& options) {
  using namespace tessera::comm;
  const Rendezvous met = rendezvous(environment, options, settings_of(options, at::kCPU));
  const auto context = std::make_shared<GroupContext>(met.store, environment.rank, environment.world_size,
                                                      met.serves_store, options);
  const auto stream = std::make_shared<testing::Stream>();
  const auto comm = std::make_shared<TransportCommunicator>(
      context, options.timeout, [&](const GroupStore&, const FailureHook&) {
        return std::make_unique<testing::StreamTransport>(stream);
      });
  comm->all_reduce(at::ones({8}), "numbers")->wait();
  if (environment.rank == 1) be_killed();
  stream->synchronize();
  comm->all_reduce(at::ones({8}), "the next")->wait();
}

void add_up(const CommunicatorPtr& comm, const at::Tensor& buffer) {
  comm->all_reduce(buffer, "numbers")->wait();
}

void add_up_often(const CommunicatorPtr& comm, const at::Tensor& buffer) {
  const int ranks = comm->size(), count = std::atoi(std::getenv("TEST_SUMS"));
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) {
    add_up(comm, buffer.fill_(comm->rank() + i));
    if (!buffer.eq(ranks * i + ranks * (ranks - 1) / 2).all().item<bool>())
      throw std::logic_error("wrong sum");
  }
  say(std::to_string(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()));
}

/// FNV-1a over the bytes of tensors.
uint64_t hash_of(const std::vector<at::Tensor>& tensors) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor bytes = tensor.cpu().view(at::kByte);
    for (int64_t i = 0; i < bytes.numel(); ++i)
      hash = (hash ^ bytes.const_data_ptr<uint8_t>()[i]) * 0x100000001b3u;
  }
  return hash;
}

/// Sums of random numbers in every dtype, in memory that all ranks have mapped and in other memory.
uint64_t bits_of_collectives(const CommunicatorPtr& comm) {
  constexpr int64_t kShard = 50'021;
  const int size = comm->size(), rank = comm->rank();
  const at::Device device = comm->device();
  at::manual_seed(static_cast<uint64_t>(rank) + 1);
  std::vector<at::Tensor> results;
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    for (const bool in_place : {true, false}) {
      const auto options = at::TensorOptions().device(device).dtype(type);
      const int64_t numel = size * kShard, bytes = numel * static_cast<int64_t>(at::elementSize(type));
      at::Tensor full = in_place ? comm->allocate_symmetric(bytes, device, "buffer").view(type)
                                 : at::empty({numel}, options);
      const at::Tensor values = at::randn({numel}).to(options);
      at::Tensor shard = at::ones({kShard}, options.dtype(type == at::kDouble ? at::kDouble : at::kFloat));
      full.copy_(values);
      comm->reduce_scatter(full, {shard, 1.0 / 3, /*add=*/true}, "gradients")->wait();
      results.push_back(shard);
      full.copy_(values);
      comm->all_reduce(full, "sum", 1.0 / 7)->wait();
      results.push_back(full.clone());
      comm->all_gather(full, values.narrow(0, rank * kShard, kShard).clone(), "parameters")->wait();
      results.push_back(full.clone());
      full.copy_(values);
      comm->broadcast(full, size - 1, "copy")->wait();
      results.push_back(full.clone());
      comm->barrier("next");
    }
  return hash_of(results);
}

void run(const std::string& scenario, const std::string& what, CommunicatorPtr comm) {
  const char* numel = std::getenv("TEST_NUMEL");
  at::Tensor buffer = at::ones({numel != nullptr ? std::atoll(numel) : 1 << 16});
  if (scenario == "wait") {
    wait_for_all(what, comm);
  } else if (scenario == "sum") {
    add_up(comm, buffer);
    say(tessera::str("sum ", buffer[0].item<float>(), " backend ", comm->backend()));
  } else if (scenario == "bits") {
    say(tessera::str("bits ", bits_of_collectives(comm), " backend ", comm->backend()));
  } else if (scenario == "sums") {
    add_up_often(comm, buffer);
  } else if (scenario == "loop") {
    for (bool first = true;; first = false) {
      add_up(comm, buffer.fill_(1));
      if (first) say("running");
      std::this_thread::sleep_for(setting("TEST_PAUSE_MS", 0));
    }
  } else if (scenario == "device_loop") {
    buffer = buffer.to(comm->device());
    for (bool first = true;; first = false) {
      add_up(comm, buffer.fill_(1));
      buffer[0].item<float>();  // waits in the driver
      if (first) say("running");
    }
  } else if (scenario == "exchange") {
    for (int i = 0; i < 50; ++i) {
      const auto values = comm->exchange(tessera::str(comm->rank(), "/", i), "texts");
      for (int r = 0; r < comm->size(); ++r) {
        if (values[static_cast<size_t>(r)] != tessera::str(r, "/", i)) throw std::logic_error("wrong value");
      }
    }
    say("exchanged");
  } else if (scenario == "exchange_loop") {
    for (bool first = true;; first = false) {
      comm->exchange("", "texts");
      if (first) say("running");
    }
  } else if (scenario == "fail") {
    try {
      if (comm->rank() == 1) throw tessera::DataError("data/train: truncated");
    } catch (const tessera::Error& error) {
      tessera::comm::leave_because_of(error, *comm);
      throw;
    }
    add_up(comm, buffer);
  } else if (scenario == "rank_0_is_done_first") {
    const bool is_first = comm->rank() == 0;
    const auto others = comm->split(is_first ? std::vector<int>{0} : std::vector<int>{1, 2}, "others");
    if (is_first) return;
    std::this_thread::sleep_for(std::chrono::seconds(7));
    others->exchange("", "late");
  } else if (scenario == "needs_rank_0_to_leave") {
    // Rank 0 leaves, and then does what the other needs before it leaves; for TEST_PAUSE_MS it is there.
    const std::filesystem::path file = std::getenv("TEST_FILE");
    if (comm->rank() == 0) {
      comm.reset();
      std::ofstream{file};
      say("left");
      return;
    }
    while (!std::filesystem::exists(file)) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::this_thread::sleep_for(setting("TEST_PAUSE_MS", 0));
  } else {
    throw std::logic_error("unknown scenario " + scenario);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  if (!words.empty() && words[0] == "serve") words = tessera::comm::testing::serve_ranks();
  if (const char* most = std::getenv("TEST_NOFILE")) {
    const rlimit limit{static_cast<rlim_t>(std::atoi(most)), static_cast<rlim_t>(std::atoi(most))};
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  if (const char* soft = std::getenv("TEST_SOFT_NOFILE")) {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = static_cast<rlim_t>(std::atoi(soft));
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  if (std::getenv("TEST_NO_LOOPBACK") && unshare(CLONE_NEWNET) != 0 &&
      unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0)
    return 77;
  try {
    tessera::comm::JoinOptions options;
    if (const char* backend = std::getenv("TEST_BACKEND")) options.backend = backend;
    if (const char* device = std::getenv("TEST_DEVICE")) options.device = device;
    tessera::comm::GivenMachine given;
    if (options.device == "cpu") given = tessera::comm::testing::with_host_devices();
    options.verify = std::getenv("TEST_VERIFY") != nullptr;
    options.timeout = setting("TEST_TIMEOUT_MS", 60000);
    options.rendezvous_timeout = setting("TEST_RENDEZVOUS_MS", 30000);
    if (const char* hosts = std::getenv("TEST_HOSTS"))
      given.host = [hosts](int rank) { return std::string(1, hosts[rank]); };
    if (std::getenv("TEST_LOG")) options.log = tessera::Logger(tessera::LogOptions{});
    const std::string scenario = !words.empty() ? words[0] : "sum", what = words.size() > 1 ? words[1] : "";
    if (scenario == "stream") {
      wait_in_stream(tessera::comm::environment(), options);
      return 0;
    }
    run(scenario, what, join(what, tessera::comm::environment(), options, given));
  } catch (const tessera::Error& error) {
    const bool of_peer = dynamic_cast<const tessera::PeerFailure*>(&error) != nullptr;
    if (std::getenv("TEST_KIND")) say(of_peer ? "of a peer" : "its own");
    say(std::string("error: ") + error.what());
    return 3;
  }
  return 0;
}

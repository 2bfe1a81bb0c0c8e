#include "comm/rendezvous.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <array>
#include <thread>

#include "comm/c10_words.h"
#include "comm/explain.h"
#include "comm/network.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLinger{500};

std::string host_name() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

c10::intrusive_ptr<c10d::Store> open_store(const Environment& env, const std::string& host,
                                           milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(env.master_port);
  options.isServer = env.rank == 0 && !env.agent_store;
  options.waitWorkers = false;  // register_rank() does it, with names
  options.timeout = timeout;
  if (!options.isServer) {
    // TCPStore would retry as well, but a second apart, and with a page of warnings.
    await_server(host, env.master_port, timeout);
  } else if (env.store_fd >= 0) {
    check_listening(env.store_fd);
    options.masterListenFd = env.store_fd;
  } else {
    options.masterListenFd = listen_for_store(host, env.master_port);
  }
  try {
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  } catch (const std::exception& error) {
    throw CommError(str("rank ", env.rank, " cannot join the rendezvous at ", endpoint(host, env.master_port),
                        " (", words_of(error), ")"));
  }
}

/// Tells the ranks that wait that the group cannot come about. Returns what to throw: the first such word.
CommError refusal(const GroupStore& store, const std::string& why) {
  return CommError(store.claim("refused", why));
}

/// Returns whether all ranks share a loopback interface.
bool register_rank(const GroupStore& store, const Environment& env, milliseconds timeout) {
  const std::string claimed = store.claim("world", str(env.world_size, " on rank ", env.rank));
  if (claimed.substr(0, claimed.find(' ')) != std::to_string(env.world_size)) {
    throw refusal(store, str("WORLD_SIZE differs between ranks: it is ", env.world_size, " on rank ",
                             env.rank, " and ", claimed));
  }
  const std::string domain = loopback_domain();
  const std::string me = str("process ", getpid(), " on ", host_name());
  const std::string holder = store.claim(str("rank/", env.rank), str(domain, '\n', me));
  const std::string other = holder.substr(holder.find('\n') + 1);
  if (other != me) {
    throw refusal(store, str("RANK=", env.rank, " is given to two processes: ", other, " and ", me));
  }
  const std::vector<int> missing = store.await_ranks("rank/", env.world_size, timeout, [&] {
    if (store.has("refused")) throw CommError(store.get("refused"));
  });
  if (!missing.empty()) {
    throw refusal(store,
                  str(name_ranks(missing), " of ", env.world_size, missing.size() == 1 ? " has" : " have",
                      " not arrived at the rendezvous within ", name_duration(timeout)));
  }
  bool one_host = true;
  for (int r = 0; r < env.world_size; ++r) {
    const std::string entry = store.get(str("rank/", r));
    one_host = one_host && entry.substr(0, entry.find('\n')) == domain;
  }
  return one_host;
}

}  // namespace

Meeting meet(const Environment& env, milliseconds timeout) {
  // "localhost" may mean ::1 on one side and 127.0.0.1 on the other.
  const std::string host = env.master_addr == "localhost" ? "127.0.0.1" : env.master_addr;
  const std::string where =
      str(env.agent_store ? "torchrun's agent is gone: the store at " : "rank 0 is gone: its store at ",
          endpoint(host, env.master_port));
  // The agent's store outlives the ranks it restarts; torch keeps its attempts apart in the same way.
  const std::string prefix = env.agent_store ? str("tessera/attempt_", env.restart_count) : "tessera";
  Meeting meeting{GroupStore(open_store(env, host, timeout), where).under(prefix)};
  meeting.serves = env.rank == 0 && !env.agent_store;
  try {
    meeting.one_host = register_rank(meeting.store, env, timeout);
  } catch (const CommError&) {
    // The store must last until those who wait have asked again (GroupStore::await_ranks).
    if (meeting.serves) std::this_thread::sleep_for(kLinger);
    throw;
  }
  return meeting;
}

}  // namespace tessera::comm

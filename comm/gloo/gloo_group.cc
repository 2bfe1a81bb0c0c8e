#include "comm/gloo/gloo_group.h"

#include <c10/util/Logging.h>
#include <net/if.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "comm/control/error_message.h"
#include "comm/control/store_exchange.h"
#include "core/error.h"
#include "core/random_digits.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kMaxAttempts = 5;
constexpr size_t kWordBytes = 32;
/// A device's first number is at least this, which no program sends by chance, and one of so many.
constexpr int kFewestNumbersPassed = 1024;
constexpr unsigned kFirstNumbers = 4096;
/// The words arrive within this time, once a rank has connected: the others may still be connecting.
constexpr milliseconds kProofTime{5000};

using GroupPtr = c10::intrusive_ptr<GlooGroup>;

std::string bound_to(const GlooOptions& options) {
  return options.interfaces.empty() ? options.address : str("GLOO_SOCKET_IFNAME=", options.interfaces);
}

GroupPtr connect(const GroupStore& store, const GlooOptions& options) {
  // Gloo waits five times this for a connection. Collectives give their own timeout.
  auto group_options =
      c10d::ProcessGroupGloo::Options::create(std::max(options.connect_timeout / 5, milliseconds(1000)));
  group_options->devices = options.devices;
  group_options->group_name = "tessera";
  return c10::make_intrusive<GlooGroup>(store.c10d_store(), options.rank, options.size(), group_options);
}

/// Lets nothing be said: a group that is made with it fails after it has given numbers to its connections.
class SilentStore final : public c10d::PrefixStore {
 public:
  SilentStore() : PrefixStore("", c10::make_intrusive<c10d::HashStore>()) {}
  void set(const std::string&, const std::vector<uint8_t>&) override { throw CommError("nothing is said"); }
};

/// c10d logs nothing meanwhile.
class Quiet {
 public:
  Quiet() : lock_(mutex()), before_(level().exchange(c10::GLOG_FATAL)) {}
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
  ~Quiet() { level().store(before_); }

 private:
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static std::atomic_ref<int> level() { return std::atomic_ref<int>(FLAGS_caffe2_log_level); }

  std::lock_guard<std::mutex> lock_;
  int before_;
};

/// Makes the device give its connections numbers from a random one on [Note: proven connections]: a group of
/// that many ranks takes those before it, and is given up before it connects anything.
void begin_at_random_number(const GlooDevices::value_type& device) {
  try {
    std::random_device random;
    auto options = c10d::ProcessGroupGloo::Options::create(milliseconds(1));
    options->devices = {device};
    const int size = 1 + kFewestNumbersPassed + static_cast<int>(random() % kFirstNumbers);
    const Quiet quiet;
    std::ignore = c10::make_intrusive<GlooGroup>(c10::make_intrusive<SilentStore>(), 0, size, options);
  } catch (const std::exception&) {  // of the store, as it should be; else the numbers begin at 0
  }
}

/// Collective. Sends this rank's word to all over each device, and expects each rank's from it. Throws.
void prove(GlooGroup& group, const std::vector<std::string>& words, int rank) {
  const auto size = static_cast<int64_t>(words.size());
  const auto sent = std::make_shared<at::Tensor>(reduction_buffer(size * kWordBytes));
  const auto received = std::make_shared<at::Tensor>(reduction_buffer(size * kWordBytes));
  at::Tensor sent_bytes = plain_bytes(sent), received_bytes = plain_bytes(received);
  auto* const out = static_cast<char*>(sent->data_ptr());
  for (size_t to = 0; to < words.size(); ++to)
    std::memcpy(out + to * kWordBytes, words[static_cast<size_t>(rank)].data(), kWordBytes);
  for (uint32_t tag = 0; tag < group.num_contexts(); ++tag) {
    std::memset(received->data_ptr(), 0, received->nbytes());
    std::vector<int64_t> equal_slices;
    c10d::AllToAllOptions options;
    options.timeout = kProofTime;
    group.use_tag(tag);
    group.alltoall_base(received_bytes, sent_bytes, equal_slices, equal_slices, options)->wait(kProofTime);
    const auto* const in = static_cast<const char*>(received->const_data_ptr());
    for (size_t from = 0; from < words.size(); ++from)
      if (std::memcmp(in + from * kWordBytes, words[from].data(), kWordBytes) != 0)
        throw CommError("a connection brought something else than a rank sends");
  }
  // Gloo's threads let go of their views later. After an error they may still use the memory.
  sent->reset();
  received->reset();
}

/// Makes one attempt of all ranks after another. A rank tells the others: "c" and this rank's word
/// (connected, or proven), "a" and why not: to be tried again; "e" and why not: it has no more time.
class Attempts {
 public:
  Attempts(const GroupStore& store, const GlooOptions& options)
      : store_(store),
        options_(options),
        exchange_(store.under("connecting"), options.rank, options.size()) {}

  /// Null: to be tried again.
  GroupPtr next() {
    ++attempt_;
    std::string word = random_digits(kWordBytes / 2);
    GroupPtr group;
    if (!tell(guarded([&] {
          group = connect(store_.under(str("attempt/", attempt_)), options_);
          return word;
        })))
      return nullptr;
    const std::vector<std::string> words = told_;
    const std::string proof = guarded([&] {
      prove(*group, words, options_.rank);
      return word;
    });
    if (proof[0] != 'c') group->abort();
    if (tell(proof)) return group;
    group->abort();
    release_aborted(std::move(group));
    return nullptr;
  }

 private:
  template <class Function>
  std::string guarded(Function&& function) const {
    try {
      return "c" + function();
    } catch (const std::exception& error) {
      store_.check_all_alive(milliseconds(200));
      const bool again = attempt_ < kMaxAttempts && elapsed() < options_.connect_timeout;
      return str(again ? 'a' : 'e', "rank ", options_.name(options_.rank),
                 " cannot connect to the other ranks over ", bound_to(options_), " (", error_message(error),
                 ")");
    }
  }

  milliseconds elapsed() const {
    return std::chrono::duration_cast<milliseconds>(steady_clock::now() - start_);
  }

  /// Whether it has worked on all ranks; their words are then in told_.
  bool tell(const std::string& outcome) {
    // The others may have begun later, and wait in Gloo as long as it lets them.
    const milliseconds patience =
        std::max(options_.connect_timeout - elapsed(), milliseconds(0)) + kProofTime;
    const StoreExchange::Result result = exchange_.run(outcome, patience, [] {});
    if (!result.missing.empty()) {
      if (outcome[0] != 'c') throw CommError(outcome.substr(1));
      throw CommError("rank ", options_.name(options_.rank), ": ", result.missing.size(), " of ",
                      options_.size() - 1, " other ranks have not connected over ", bound_to(options_));
    }
    if (result.values.empty())
      throw CommError("rank ", options_.name(options_.rank), ", while ranks connected over ",
                      bound_to(options_), ": ", result.cause);
    const std::string* failure = nullptr;
    told_.clear();
    for (const std::string& value : result.values) {
      if (value[0] == 'e') throw CommError(value.substr(1));
      if (value[0] == 'a' && failure == nullptr) failure = &value;
      told_.push_back(value.substr(1));
    }
    if (failure == nullptr) return true;
    if (options_.rank == 0) options_.log.warning(str(failure->substr(1), "; connecting again"));
    return false;
  }

  const GroupStore& store_;
  const GlooOptions& options_;
  StoreExchange exchange_;
  const steady_clock::time_point start_ = steady_clock::now();
  int attempt_ = 0;
  std::vector<std::string> told_;
};

}  // namespace

void GlooGroup::abort() {
  for (int tag = 0; tag < static_cast<int>(contexts_.size()); ++tag) {
    for (int peer = 0; peer < getSize(); ++peer) {
      if (peer == getRank()) continue;
      try {
        std::vector<at::Tensor> unanswered{scratch_};
        recv(unanswered, peer, tag)->wait(milliseconds(1));
      } catch (const std::exception&) {
      }
    }
  }
}

void release_aborted(c10::intrusive_ptr<GlooGroup> group) {
  constexpr milliseconds kMoment{200};
  std::promise<void> destroyed;
  const std::future<void> end = destroyed.get_future();
  std::thread([group = std::move(group), destroyed = std::move(destroyed)]() mutable {
    group.reset();
    destroyed.set_value();
  }).detach();
  end.wait_for(kMoment);
}

c10::intrusive_ptr<GlooGroup> connect_gloo_group(const GroupStore& store, const GlooOptions& options) {
  Attempts attempts(store, options);
  for (;;)
    if (GroupPtr group = attempts.next()) return group;
}

GlooDevices open_gloo_devices(const GlooOptions& options) {
  GlooDevices opened;
  try {
    if (options.interfaces.empty())
      opened.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
    std::istringstream names(options.interfaces);
    for (std::string name; std::getline(names, name, ',');) {
      if (if_nametoindex(name.c_str()) == 0) {
        throw CommError("GLOO_SOCKET_IFNAME=", options.interfaces, ": this host has no network interface '",
                        name, "'");
      }
      opened.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(name));
    }
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    throw CommError("rank ", options.name(options.rank), " cannot listen on ", bound_to(options), " (",
                    error_message(error), ")");
  }
  for (const auto& device : opened) begin_at_random_number(device);
  return opened;
}

}  // namespace tessera::comm

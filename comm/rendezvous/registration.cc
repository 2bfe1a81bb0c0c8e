#include "comm/rendezvous/registration.h"

#include <algorithm>
#include <sstream>

#include "comm/control/error_message.h"
#include "comm/rendezvous/network.h"
#include "core/environment/ended_ranks.h"
#include "core/peer_failure.h"
#include "core/str.h"

namespace tessera::comm {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

namespace {

/// Begins a reason that is another rank's end.
constexpr char kOfPeer = '!';

/// Throws what a rank has written as the reason why there will be no group.
[[noreturn]] void throw_refused(const std::string& why) {
  if (why.starts_with(kOfPeer)) throw PeerFailure(why.substr(1));
  throw CommError(why);
}

/// Tells the ranks that wait that there will be no group. Throws the first such reason.
[[noreturn]] void refuse(const GroupStore& store, const std::string& why) {
  throw_refused(store.claim("refused", why));
}

std::string encode(const RankInfo& info) {
  std::string text = str(info.domain, '\n', info.may_share, '\n', info.process, '\n', info.endpoint, '\n');
  for (const auto& [name, value] : info.settings) text += str(name, '\t', value, '\n');
  return text;
}

RankInfo decode(const std::string& text) {
  RankInfo info;
  std::istringstream lines(text);
  for (std::string* field : {&info.domain, &info.may_share, &info.process, &info.endpoint})
    std::getline(lines, *field);
  for (std::string line; std::getline(lines, line);) {
    const size_t tab = line.find('\t');
    if (tab != std::string::npos) info.settings[line.substr(0, tab)] = line.substr(tab + 1);
  }
  return info;
}

void check_settings(const std::vector<RankInfo>& ranks) {
  for (const auto& [name, value] : ranks.front().settings)
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      const auto theirs = ranks[rank].settings.find(name);
      const std::string found = theirs == ranks[rank].settings.end() ? "not given" : theirs->second;
      if (found != value)
        throw CommError(name, " differs between ranks: it is ", value, " on rank 0 and ", found, " on rank ",
                        rank);
    }
}

std::vector<int> missing_ranks(const GroupStore& store, int world_size) {
  std::vector<int> missing;
  for (int rank = 0; rank < world_size; ++rank)
    if (!store.has(str("rank/", rank))) missing.push_back(rank);
  return missing;
}

std::string describe_early_end(int rank, const Environment& env) {
  return str(
      "rank ", rank, " of ", env.world_size,
      " has ended with exit code 0 before it joined the others, which wait for it; expected all ranks to "
      "join the group");
}

/// The last one to arrive tells the others, so that each asks for one key only.
void await_all(const GroupStore& store, const Environment& env, WaitLimit& limit) {
  const int64_t arrived = store.add("arrived", 1);
  if (arrived == env.world_size) return store.set("complete", "");
  const std::string own_key = str("rank/", env.rank);
  auto next_check = Clock::now() + kStoreCheckInterval;
  bool all_had_come = false;
  const auto check_still_there = [&] {
    if (Clock::now() < next_check) return;
    next_check = Clock::now() + kStoreCheckInterval;
    const int64_t now = store.add("arrived", 0);
    if (now < arrived || now > env.world_size) refuse(store, removed_from_store("arrived").what());
    if (!store.has(own_key)) refuse(store, removed_from_store(own_key).what());
    // All have come since the last check, and the key by which the last one says so is not there.
    if (now == env.world_size && all_had_come) store.set("complete", "");
    all_had_come = now == env.world_size;
  };
  const auto watch = [&] {
    if (const auto refused = store.find("refused")) throw_refused(*refused);
    for (const int ended : ended_ranks())
      if (ended < env.world_size && !store.has(str("rank/", ended)))
        refuse(store, kOfPeer + describe_early_end(ended, env));
    check_still_there();
    limit.still_waiting([&] {
      const std::vector<int> missing = missing_ranks(store, env.world_size);
      const std::string whom =
          missing.empty() ? "the last rank to say that all have come, all" : name_ranks(missing);
      return str("rank ", env.rank, " waits at the rendezvous at ",
                 endpoint(env.master_addr, env.master_port), " for ", whom, " of ", env.world_size);
    });
  };
  if (store.await("complete", limit.left(), watch)) return;
  const std::vector<int> missing = missing_ranks(store, env.world_size);
  if (missing.empty())
    refuse(store, str("all ", env.world_size,
                      " ranks have arrived at the rendezvous, but the last of them has not said so within ",
                      name_duration(limit.timeout())));
  refuse(store, str(name_ranks(missing), " of ", env.world_size, missing.size() == 1 ? " has" : " have",
                    " not arrived at the rendezvous within ", name_duration(limit.timeout())));
}

}  // namespace

WaitLimit::WaitLimit(milliseconds timeout, const Logger& log, const std::function<void()>& interrupt)
    : timeout_(timeout), log_(log), interrupt_(interrupt) {}

milliseconds WaitLimit::left() const {
  return std::max(std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now()), milliseconds(1));
}

void WaitLimit::still_waiting(const std::function<std::string()>& describe) {
  if (interrupt_) interrupt_();
  if (Clock::now() < next_) return;
  next_ = Clock::now() + std::chrono::minutes(1);
  log_.info(str(describe(), "; gives up in ", std::chrono::ceil<std::chrono::seconds>(left()).count(), " s"));
}

void check_rank_0_runs(const Environment& env) {
  const std::vector<int> ended = ended_ranks();
  if (std::find(ended.begin(), ended.end(), 0) != ended.end()) throw PeerFailure(describe_early_end(0, env));
}

std::vector<RankInfo> register_rank(const GroupStore& store, const Environment& env, const RankInfo& mine,
                                    WaitLimit& limit) {
  const std::string claimed = store.claim("world", str(env.world_size, " on rank ", env.rank));
  if (claimed.substr(0, claimed.find(' ')) != std::to_string(env.world_size)) {
    refuse(store, str("WORLD_SIZE differs between ranks: it is ", env.world_size, " on rank ", env.rank,
                      " and ", claimed));
  }
  const RankInfo holder = decode(store.claim(str("rank/", env.rank), encode(mine)));
  if (holder.process != mine.process) {
    refuse(store,
           str("RANK=", env.rank, " is given to two processes: ", holder.process, " and ", mine.process));
  }
  await_all(store, env, limit);
  std::vector<RankInfo> ranks;
  for (const std::string& text : store.get_all("rank/", all_ranks(env.world_size)))
    ranks.push_back(decode(text));
  check_settings(ranks);
  return ranks;
}

}  // namespace tessera::comm

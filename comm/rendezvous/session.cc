#include "comm/rendezvous/session.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "comm/control/error_message.h"
#include "comm/control/sealed_store.h"
#include "comm/rendezvous/network.h"
#include "core/error.h"
#include "core/random_digits.h"
#include "core/str.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr size_t kWordBytes = 16;
/// After so long a challenge is written again.
constexpr milliseconds kAgain{500};
/// A rank 0 that is there and has not answered for this long has another secret.
constexpr std::chrono::seconds kNoAnswer{10};

/// Counts how often a challenge was written.
constexpr const char* kAsked = "asked";

std::string challenge_key(int rank) { return str("challenge/", rank); }
std::string answer_key(int rank, const std::string& challenge) {
  return str("answer/", rank, '/', challenge);
}

/// Answers the challenges that have come since. `answered`: by rank, the last one.
void answer_new(const GroupStore& store, const std::string& word, std::vector<std::string>& answered) {
  for (size_t rank = 1; rank < answered.size(); ++rank) {
    const int number = static_cast<int>(rank);
    try {
      const std::optional<std::string> challenge = store.find(challenge_key(number));
      if (!challenge || challenge->size() != 2 * kWordBytes) continue;
      const std::string key = answer_key(number, *challenge);
      if (*challenge == answered[rank] && store.has(key)) continue;  // it may have been removed
      store.set(key, word);
      answered[rank] = *challenge;
    } catch (const StoreIsGone&) {
      throw;
    } catch (const CommError&) {  // a stranger's, who has written over it
    }
  }
}

/// Rank 0's thread. It looks at the challenges when there was one since the last time.
void answer_challenges(const std::stop_token& stop, const GroupStore& store, int world_size,
                       const std::string& word) {
  std::vector<std::string> answered(static_cast<size_t>(world_size));
  std::mutex mutex;
  std::unique_lock lock(mutex);
  std::condition_variable_any stopped;
  int64_t num_seen = 0;
  try {
    for (milliseconds pause{1}; !stop.stop_requested(); pause = std::min(2 * pause, milliseconds(10))) {
      const auto begin = Clock::now();
      if (const int64_t num_asked = store.add(kAsked, 0); std::exchange(num_seen, num_asked) != num_asked)
        answer_new(store, word, answered);
      // A server that many ranks ask is asked less often.
      stopped.wait_for(lock, stop, std::max<Clock::duration>(pause, 5 * (Clock::now() - begin)),
                       [] { return false; });
    }
  } catch (const CommError&) {  // the store is gone, which this rank's own thread finds too
  }
}

std::string fingerprint_of(const std::string& secret) {
  return secret.empty() ? "none" : SealedStore::fingerprint(secret);
}

std::string ask_rank_0(const GroupStore& store, const GroupStore& plain, const Environment& env,
                       WaitLimit& limit) {
  const std::string challenge = random_digits(kWordBytes);
  const auto deadline = Clock::now() + limit.left();
  // Rank 0 answers within a moment. It is there if it serves this store.
  const auto unanswered = env.agent_store ? deadline : std::min(deadline, Clock::now() + kNoAnswer);
  const auto watch = [&] {
    if (Clock::now() >= unanswered) check_secret(plain, env);
    check_rank_0_runs(env);
    limit.still_waiting([&] {
      return str("rank ", env.rank, " waits at the rendezvous at ",
                 endpoint(env.master_addr, env.master_port), " for rank 0 of ", env.world_size);
    });
  };
  for (;;) {
    store.set(challenge_key(env.rank), challenge);
    store.add(kAsked, 1);
    watch();
    const auto answer = store.await(answer_key(env.rank, challenge), std::min(kAgain, limit.left()), watch);
    if (answer) return *answer;
    if (Clock::now() < deadline) continue;
    check_secret(plain, env);
    throw CommError("rank 0 of ", env.world_size, " has not answered rank ", env.rank,
                    " at the rendezvous within ", name_duration(limit.timeout()),
                    ": it has not arrived, or has another WORLD_SIZE");
  }
}

}  // namespace

void check_secret(const GroupStore& plain, const Environment& env) {
  const std::optional<std::string> theirs = plain.find("secret");
  if (!theirs || *theirs == fingerprint_of(env.run_secret)) return;
  const bool has_one = !env.run_secret.empty(), rank_0_has_one = *theirs != "none";
  throw CommError("TESSERA_RUN_SECRET ",
                  !has_one         ? "is not set"
                  : rank_0_has_one ? "differs"
                                   : "is set",
                  " on rank ", env.rank,
                  !has_one         ? ", but is on"
                  : rank_0_has_one ? " from"
                                   : ", but not on",
                  " rank 0; expected the same value on all ranks");
}

Session join_session(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix,
                     const std::string& where, const Environment& env, WaitLimit& limit) {
  const GroupStore plain = GroupStore(store, where).under(prefix);
  const std::string& secret = env.run_secret;
  if (env.rank == 0) plain.set("secret", fingerprint_of(secret));
  if (secret.empty()) {
    if (env.rank != 0) check_secret(plain, env);
    return {plain, {}};
  }
  const GroupStore challenges =
      GroupStore(c10::make_intrusive<SealedStore>(store, secret), where).under(prefix);
  std::jthread answers;
  std::string word;
  if (env.rank == 0) {
    word = random_digits(kWordBytes);
    answers = std::jthread(answer_challenges, challenges, env.world_size, word);
  } else {
    word = ask_rank_0(challenges, plain, env, limit);
  }
  return {GroupStore(c10::make_intrusive<SealedStore>(store, secret, word), where).under(prefix),
          std::move(answers)};
}

}  // namespace tessera::comm

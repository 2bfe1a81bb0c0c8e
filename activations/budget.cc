#include "activations/budget.h"

#include <algorithm>
#include <map>
#include <optional>

namespace tessera::activations {
namespace {

/// Memory that saved results share: dropped as one.
struct Candidate {
  std::vector<int> results;  // saved ones
  int64_t bytes = 0;
  bool pinned = false;
  bool dropped = false;
};

class Chooser {
 public:
  explicit Chooser(const Profile& profile) : profile_(profile), repeated_(profile.calls.size()) {
    plan_.drop.resize(profile.results.size());
    plan_.kept_bytes = profile.fixed_bytes;
    std::map<int, int> by_storage;
    for (size_t id = 0; id < profile.results.size(); ++id) {
      const Profile::Result& result = profile.results[id];
      if (!result.saved) continue;
      const auto [found, is_new] = by_storage.try_emplace(result.storage, candidates_.size());
      if (is_new) candidates_.emplace_back();
      Candidate& candidate = candidates_[found->second];
      candidate.results.push_back(static_cast<int>(id));
      candidate.bytes = std::max(candidate.bytes, result.bytes);
      candidate.pinned = candidate.pinned || result.pinned;
    }
    storages_ = std::move(by_storage);
    for (const Candidate& candidate : candidates_) plan_.kept_bytes += candidate.bytes;
  }

  Plan choose(int64_t budget) {
    while (plan_.kept_bytes > budget && drop_best()) {
    }
    // The largest first: what is dropped last may have freed more than was asked for.
    std::vector<Candidate*> dropped;
    for (Candidate& candidate : candidates_)
      if (candidate.dropped) dropped.push_back(&candidate);
    std::stable_sort(dropped.begin(), dropped.end(),
                     [](const Candidate* a, const Candidate* b) { return a->bytes > b->bytes; });
    for (Candidate* candidate : dropped)
      if (plan_.kept_bytes + candidate->bytes <= budget) take_back(*candidate);
    count_seconds();
    return plan_;
  }

 private:
  bool kept(int id) const {
    const Profile::Result& result = profile_.results[id];
    return result.saved && !candidates_[storages_.at(result.storage)].dropped;
  }

  /// The calls to repeat in addition if the candidate is dropped; nothing if it cannot be made again.
  std::optional<std::vector<int>> calls_for(const Candidate& candidate) {
    std::vector<int> calls, wanted = candidate.results;
    std::vector<bool> seen(profile_.calls.size());
    while (!wanted.empty()) {
      const int call = profile_.results[wanted.back()].call;
      wanted.pop_back();
      if (call < 0 || !profile_.calls[call].repeatable) return std::nullopt;
      if (seen[call] || repeated_[call]) continue;
      seen[call] = true;
      calls.push_back(call);
      for (const int input : profile_.calls[call].inputs)
        if (!kept(input) || profile_.results[input].storage == profile_.results[candidate.results[0]].storage)
          wanted.push_back(input);
    }
    return calls;
  }

  bool drop_best() {
    Candidate* best = nullptr;
    std::vector<int> best_calls;
    double best_value = 0;
    for (Candidate& candidate : candidates_) {
      if (candidate.dropped || candidate.pinned || candidate.bytes == 0) continue;
      const auto calls = calls_for(candidate);
      if (!calls) continue;
      double seconds = 1e-7;
      for (const int call : *calls) seconds += profile_.calls[call].seconds;
      const double value = static_cast<double>(candidate.bytes) / seconds;
      if (value <= best_value) continue;
      best = &candidate;
      best_calls = *calls;
      best_value = value;
    }
    if (best == nullptr) return false;
    best->dropped = true;
    for (const int call : best_calls) repeated_[call] = true;
    for (const int id : best->results) plan_.drop[id] = true;
    plan_.kept_bytes -= best->bytes;
    return true;
  }

  void take_back(Candidate& candidate) {
    candidate.dropped = false;
    for (const int id : candidate.results) plan_.drop[id] = false;
    plan_.kept_bytes += candidate.bytes;
  }

  /// Of what is dropped in the end.
  void count_seconds() {
    repeated_.assign(profile_.calls.size(), false);
    for (const Candidate& candidate : candidates_) {
      if (!candidate.dropped) continue;
      const auto calls = calls_for(candidate);
      for (const int call : calls.value_or(std::vector<int>())) {
        repeated_[call] = true;
        plan_.seconds += profile_.calls[call].seconds;
      }
    }
  }

  const Profile& profile_;
  std::vector<bool> repeated_;  // by call: what is dropped so far needs it anyway
  std::vector<Candidate> candidates_;
  std::map<int, int> storages_;  // storage -> candidate
  Plan plan_;
};

}  // namespace

Plan choose(const Profile& profile, int64_t budget_bytes) { return Chooser(profile).choose(budget_bytes); }

}  // namespace tessera::activations

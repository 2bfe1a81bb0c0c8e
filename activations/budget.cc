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
  Fate fate = Fate::kKeep;
};

class Chooser {
 public:
  Chooser(const Profile& profile, const std::optional<OffloadCost>& offload)
      : profile_(profile), offload_(offload), repeated_(profile.calls.size()) {
    plan_.fates.resize(profile.results.size(), Fate::kKeep);
    for (const Profile::Call& call : profile.calls) forward_seconds_ += call.seconds;
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
    while (memory() > budget && free_best()) {
    }
    // The largest first: what is freed last may have freed more than was asked for.
    std::vector<Candidate*> freed;
    for (Candidate& candidate : candidates_)
      if (candidate.fate != Fate::kKeep) freed.push_back(&candidate);
    std::stable_sort(freed.begin(), freed.end(),
                     [](const Candidate* a, const Candidate* b) { return a->bytes > b->bytes; });
    for (Candidate* candidate : freed) {
      const Fate fate = candidate->fate;
      set_fate(*candidate, Fate::kKeep);
      if (memory() > budget) set_fate(*candidate, fate);
    }
    count_seconds();
    return plan_;
  }

 private:
  /// A result that is written is in a buffer as a whole.
  int64_t memory() const {
    int64_t buffers = plan_.offloaded_bytes > 0 ? offload_->buffer_bytes : 0;
    for (const Candidate& candidate : candidates_)
      if (candidate.fate == Fate::kOffload) buffers = std::max(buffers, candidate.bytes);
    return plan_.kept_bytes + buffers;
  }

  /// Returns whether the result is kept in memory or on disk, so that recomputation can start from it.
  bool kept(int id) const {
    const Profile::Result& result = profile_.results[id];
    return result.saved && candidates_[storages_.at(result.storage)].fate != Fate::kRecompute;
  }

  /// Seconds that a step loses when so much is offloaded.
  double offload_seconds(int64_t bytes) const {
    const SpillRates& rates = offload_->rates;
    const auto all = static_cast<double>(bytes);
    return all / rates.copy + std::max(0.0, all / rates.write - forward_seconds_) +
           std::max(0.0, all / rates.read - 2 * forward_seconds_);
  }
  double offload_seconds_more(const Candidate& candidate) const {
    return offload_seconds(plan_.offloaded_bytes + candidate.bytes) - offload_seconds(plan_.offloaded_bytes);
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

  struct Choice {
    Candidate* candidate = nullptr;
    Fate fate = Fate::kKeep;
    double bytes_per_second = 0;
    std::vector<int> calls = {};  // to repeat
  };

  void consider(Candidate& candidate, Choice& best) {
    const auto value_of = [&](double seconds) {
      return static_cast<double>(candidate.bytes) / (seconds + 1e-7);
    };
    if (auto calls = calls_for(candidate)) {
      double seconds = 0;
      for (const int call : *calls) seconds += profile_.calls[call].seconds;
      if (value_of(seconds) > best.bytes_per_second)
        best = {&candidate, Fate::kRecompute, value_of(seconds), std::move(*calls)};
    }
    if (offload_ && candidate.bytes >= offload_->min_bytes) {
      const double value = value_of(offload_seconds_more(candidate));
      if (value > best.bytes_per_second) best = {&candidate, Fate::kOffload, value};
    }
  }

  bool free_best() {
    Choice best;
    for (Candidate& candidate : candidates_)
      if (candidate.fate == Fate::kKeep && !candidate.pinned && candidate.bytes > 0)
        consider(candidate, best);
    if (best.candidate == nullptr) return false;
    for (const int call : best.calls) repeated_[call] = true;
    set_fate(*best.candidate, best.fate);
    return true;
  }

  void set_fate(Candidate& candidate, Fate fate) {
    const auto count = [&](int64_t sign) {
      if (candidate.fate == Fate::kKeep) plan_.kept_bytes += sign * candidate.bytes;
      if (candidate.fate == Fate::kOffload) plan_.offloaded_bytes += sign * candidate.bytes;
    };
    count(-1);
    candidate.fate = fate;
    count(+1);
    for (const int id : candidate.results) plan_.fates[id] = fate;
  }

  /// Counts the seconds that recomputing what is dropped in the end takes.
  void count_seconds() {
    repeated_.assign(profile_.calls.size(), false);
    for (const Candidate& candidate : candidates_) {
      if (candidate.fate != Fate::kRecompute) continue;
      const auto calls = calls_for(candidate);
      for (const int call : calls.value_or(std::vector<int>())) {
        repeated_[call] = true;
        plan_.seconds += profile_.calls[call].seconds;
      }
    }
  }

  const Profile& profile_;
  const std::optional<OffloadCost>& offload_;
  double forward_seconds_ = 0;
  std::vector<bool> repeated_;  // by call: what is dropped so far needs it anyway
  std::vector<Candidate> candidates_;
  std::map<int, int> storages_;  // storage -> candidate
  Plan plan_;
};

}  // namespace

Plan choose(const Profile& profile, int64_t budget_bytes, const std::optional<OffloadCost>& offload) {
  return Chooser(profile, offload).choose(budget_bytes);
}

}  // namespace tessera::activations

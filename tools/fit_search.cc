#include "tools/fit_search.h"

#include <algorithm>
#include <utility>

#include "tools/counted_model.h"

namespace tessera::tools {

using zero::Tier;

bool is_within(int64_t memory, int64_t limit) {
  constexpr double kReserve = 0.03;
  return static_cast<double>(memory) * (1 + kReserve) <= static_cast<double>(limit);
}

FitSearch::FitSearch(SearchSpace space, FitTrials& trials, std::function<void(const Tried&)> report)
    : space_(std::move(space)), trials_(trials), report_(std::move(report)) {}

/// The stages with which this may lie on disk, of which each needs less memory than the one before.
std::vector<int> FitSearch::stages_for(OnDisk on_disk) const {
  std::vector<int> stages;
  int64_t last = INT64_MAX;
  for (const int stage : space_.stages) {
    if (!can_offload(stage, space_.world, tiers_of(on_disk))) continue;
    const int64_t bytes =
        space_.state_bytes({.stage = stage, .on_disk = on_disk, .world = space_.world}, Tier::kDevice);
    if (bytes < last) stages.push_back(stage);
    last = std::min(last, bytes);
  }
  return stages;
}

Setting FitSearch::setting_of(int stage, OnDisk on_disk, const std::string& policy,
                              int64_t micro_batch) const {
  return {.stage = stage,
          .on_disk = on_disk,
          .policy = policy,
          .micro_batch = micro_batch,
          .accumulation = std::max<int64_t>(1, space_.samples_of_a_step / micro_batch),
          .world = space_.world};
}

/// What may need the least of all that has this on disk; expects that stages_for() has a stage. A step in one
/// micro-batch needs no memory between micro-batches, and smaller ones need less within them.
std::vector<Setting> FitSearch::least_settings(OnDisk on_disk) const {
  const int stage = stages_for(on_disk).back();
  std::vector<Setting> settings;
  for (const std::string& policy : {space_.policies.front(), space_.policies.back()})
    for (const int64_t micro_batch : {space_.micro_batches.front(), space_.micro_batches.back()})
      if (const Setting one = setting_of(stage, on_disk, policy, micro_batch);
          std::find(settings.begin(), settings.end(), one) == settings.end())
        settings.push_back(one);
  return settings;
}

bool FitSearch::may_fit(OnDisk on_disk) {
  const std::vector<Setting> settings = least_settings(on_disk);
  return std::any_of(settings.rbegin(), settings.rend(),
                     [&](const Setting& one) { return consider(one).fits; });
}

std::vector<OnDisk> FitSearch::choices() const {
  std::vector<OnDisk> choices;
  for (const OnDisk on_disk : kAllOnDiskChoices)
    if ((space_.disk || on_disk == OnDisk::kNothing) &&
        (space_.small_units || on_disk != OnDisk::kAllSmallUnits) && !stages_for(on_disk).empty())
      choices.push_back(on_disk);
  return choices;
}

const Tried* FitSearch::tried(const Setting& setting) const {
  const auto found = tried_.find(setting);
  return found == tried_.end() ? nullptr : &found->second;
}

/// Measures it, unless the formula alone says that it does not fit.
const Tried& FitSearch::consider(const Setting& setting) {
  if (const auto found = tried_.find(setting); found != tried_.end()) return found->second;
  Tried tried{.setting = setting};
  const int64_t state = space_.state_bytes(setting, Tier::kDevice),
                on_disk = space_.state_bytes(setting, Tier::kDisk);
  if (on_disk > space_.disk_limit) {
    tried.disk_too_small = true;
    disk_missing_ = disk_missing_ == 0 ? on_disk : std::min(disk_missing_, on_disk);
  } else if (!is_within(state, space_.memory_limit)) {
    tried.memory = state;
    tried.is_more = true;
  } else {
    const Needed needed = trials_.measure(setting);
    tried.memory = needed.memory;
    tried.is_more = needed.is_more;
    tried.step_ms = needed.step_ms;
    tried.fits = !needed.is_more && is_within(needed.memory, space_.memory_limit);
  }
  report_(tried);
  return tried_[setting] = tried;
}

/// A run evaluates and saves too. What does not hold there no longer counts as fitting.
bool FitSearch::holds_in_a_run(const Setting& setting) {
  if (trials_.options().simulate) return true;  // there are no ranks to run with
  Tried& tried = tried_.at(setting);
  constexpr int64_t kCheckpointAndExport = 2;
  int64_t bytes = 0;
  for (const Tier tier : {Tier::kDevice, Tier::kDisk}) bytes += space_.state_bytes(setting, tier);
  const Needed needed = trials_.measure_run(setting, kCheckpointAndExport * bytes);
  tried.is_more = needed.is_more;
  tried.memory = std::max(tried.memory, needed.memory);
  tried.is_whole_run = true;
  tried.grows = needed.grows;
  tried.fits = !needed.is_more && !needed.grows && is_within(needed.memory, space_.memory_limit);
  report_(tried);
  return tried.fits;
}

/// See [Note: what is cheapest].
std::optional<Tried> FitSearch::cheapest() {
  for (const OnDisk on_disk : choices())
    if (std::optional<Tried> found = cheapest_with(on_disk)) return found;
  return std::nullopt;
}

std::optional<Tried> FitSearch::cheapest_with(OnDisk on_disk) {
  const std::vector<int> stages = stages_for(on_disk);
  for (const int stage : stages) {
    const Setting setting = setting_of(stage, on_disk, space_.policies.front(), space_.micro_batches.front());
    if (consider(setting).fits && holds_in_a_run(setting)) return tried_.at(setting);
  }
  if (!may_fit(on_disk)) return std::nullopt;
  std::vector<Tried> finalists;
  for (const std::string& policy : space_.policies)
    if (std::optional<Tried> found = with_largest_micro_batch(stages.back(), on_disk, policy))
      finalists.push_back(*found);
  return best_of(std::move(finalists));
}

/// The wanted one, or else by halving, since of those that are smaller the smaller one needs less.
std::optional<Tried> FitSearch::with_largest_micro_batch(int stage, OnDisk on_disk,
                                                         const std::string& policy) {
  const auto setting = [&](size_t index) {
    return setting_of(stage, on_disk, policy, space_.micro_batches[index]);
  };
  if (consider(setting(0)).fits) return tried_.at(setting(0));
  size_t low = 1, high = space_.micro_batches.size();  // the first that fits is in [low, high]
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (consider(setting(middle)).fits)
      high = middle;
    else
      low = middle + 1;
  }
  if (low == space_.micro_batches.size()) return std::nullopt;
  return tried_.at(setting(low));
}

/// The fastest; of those that are as fast to a few percent, the one with the least recomputation.
std::optional<Tried> FitSearch::best_of(std::vector<Tried> finalists) {
  constexpr double kNoise = 1.05;
  while (!finalists.empty()) {
    auto best = finalists.begin();
    for (auto other = finalists.begin(); other != finalists.end(); ++other)
      if (other->step_ms * kNoise < best->step_ms) best = other;
    if (holds_in_a_run(best->setting)) return tried_.at(best->setting);
    finalists.erase(best);
  }
  return std::nullopt;
}

bool FitSearch::least_fits() {
  const std::vector<OnDisk> all = choices();
  return std::any_of(all.rbegin(), all.rend(), [&](OnDisk one) { return may_fit(one); });
}

Tried FitSearch::least(int64_t memory_limit) {
  const int64_t given_limit = std::exchange(space_.memory_limit, memory_limit);
  trials_.set_memory_limit(memory_limit);
  std::vector<Tried> measured;
  std::vector<OnDisk> all = choices();
  // The more is on disk, the less is in memory; without room on the disk the next one is looked at.
  for (; measured.empty() && !all.empty(); all.pop_back())
    for (const Setting& setting : least_settings(all.back())) {
      if (const Tried* known = tried(setting); known != nullptr && known->is_more) tried_.erase(setting);
      const Tried& tried = consider(setting);
      if (!tried.disk_too_small && !tried.is_more && !tried.grows) measured.push_back(tried);
    }
  std::sort(measured.begin(), measured.end(),
            [](const Tried& a, const Tried& b) { return a.memory < b.memory; });
  Tried least;
  least.is_more = true;
  for (const Tried& one : measured) {
    if (!holds_in_a_run(one.setting)) continue;
    least = tried_.at(one.setting);
    break;
  }
  space_.memory_limit = given_limit;
  trials_.set_memory_limit(given_limit);
  return least;
}

}  // namespace tessera::tools

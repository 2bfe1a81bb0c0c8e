#include "tools/memory/fit_search.h"

#include <algorithm>
#include <utility>

#include "engine/config/sharding_plan.h"
#include "tools/memory/counted_model.h"

namespace tessera::tools {

using zero::Tier;

int64_t reserve_of(int64_t memory) {
  constexpr double kPart = 0.03;
  constexpr int64_t kLeast = 25'000'000;
  return std::max(kLeast, static_cast<int64_t>(kPart * static_cast<double>(memory)));
}

bool is_within(int64_t memory, int64_t limit) { return memory + reserve_of(memory) <= limit; }

bool outgrows(const Tried& tried, int64_t limit) {
  constexpr int64_t kSteps = 100;
  return tried.growth > 0 && !is_within(tried.memory + kSteps * tried.growth, limit);
}

FitSearch::FitSearch(SearchSpace space, FitTrials& trials, SearchObserver observer)
    : space_(std::move(space)), trials_(trials), observer_(std::move(observer)) {}

/// The stages with which this may lie on disk, of which each needs less memory than the one before.
std::vector<int> FitSearch::stages_for(OnDisk on_disk) const {
  std::vector<int> stages;
  int64_t last = INT64_MAX;
  for (const int stage : space_.stages) {
    if (!can_offload(zero::sharding_of(stage), space_.world, tiers_of(on_disk))) continue;
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

/// What may need the least of all that has this on disk; expects that stages_for() has a stage. Smaller
/// micro-batches need less within them; a step in one micro-batch needs nothing between micro-batches.
std::vector<Setting> FitSearch::least_settings(OnDisk on_disk) const {
  const int stage = stages_for(on_disk).back();
  const std::string &least = space_.policies.front(), &most = space_.policies.back();
  const int64_t largest = space_.micro_batches.front(), smallest = space_.micro_batches.back();
  std::vector<Setting> settings;
  for (const auto& [policy, micro_batch] :
       {std::pair(least, smallest), std::pair(most, largest), std::pair(most, smallest)})
    if (const Setting one = setting_of(stage, on_disk, policy, micro_batch);
        std::find(settings.begin(), settings.end(), one) == settings.end())
      settings.push_back(one);
  return settings;
}

bool FitSearch::may_fit(OnDisk on_disk) {
  const std::vector<Setting> settings = least_settings(on_disk);
  return std::any_of(settings.begin(), settings.end(), [&](const Setting& one) { return fits(one); });
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

bool FitSearch::has_room_on_disk(const Setting& setting) {
  const int64_t bytes = space_.state_bytes(setting, Tier::kDisk);
  if (bytes <= space_.disk_limit) return true;
  disk_missing_ = disk_missing_ == 0 ? bytes : std::min(disk_missing_, bytes);
  return false;
}

/// Of what has room on the disk.
OnDisk FitSearch::most_on_disk() {
  std::vector<OnDisk> all = choices();
  while (all.size() > 1 && !has_room_on_disk(least_settings(all.back()).front())) all.pop_back();
  return all.back();
}

/// Measures it, unless the formula alone says that it does not fit.
const Tried& FitSearch::consider(const Setting& setting) {
  if (const auto found = tried_.find(setting); found != tried_.end()) return found->second;
  Tried tried{.setting = setting};
  const int64_t state = space_.state_bytes(setting, Tier::kDevice);
  if (!has_room_on_disk(setting)) {
    tried.disk_too_small = true;
  } else if (state > space_.memory_limit) {
    tried.memory = state;
    tried.is_more = true;
  } else {
    observer_.begins(setting, false);
    const Needed needed = trials_.measure(setting);
    tried.memory = needed.memory;
    tried.is_more = needed.is_more;
    tried.step_ms = needed.step_ms;
  }
  observer_.considered(tried);
  return tried_[setting] = tried;
}

bool FitSearch::fits(const Tried& tried) const {
  if (tried.is_more || tried.disk_too_small || outgrows(tried, space_.memory_limit)) return false;
  return is_within(tried.memory + (tried.is_whole_run ? 0 : run_extra_), space_.memory_limit);
}

/// A run evaluates and saves too. What does not hold there no longer counts as fitting.
bool FitSearch::holds_in_a_run(const Setting& setting) {
  Tried& tried = tried_.at(setting);
  if (trials_.options().simulate || tried.is_whole_run)
    return fits(tried);  // simulated: no ranks to run with
  constexpr int64_t kCheckpointAndExport = 2;
  int64_t bytes = 0;
  for (const Tier tier : {Tier::kDevice, Tier::kDisk}) bytes += space_.state_bytes(setting, tier);
  observer_.begins(setting, true);
  const Needed needed = trials_.measure_run(setting, kCheckpointAndExport * bytes, tried.step_ms);
  const int64_t by_steps = tried.memory;
  tried.is_more = needed.is_more;
  tried.memory = std::max(tried.memory, needed.memory);
  tried.is_whole_run = true;
  tried.growth = needed.growth;
  last_run_grew_ = tried.growth > 0;
  observer_.considered(tried);
  if (tried.growth == 0) run_extra_ = std::max(run_extra_, tried.memory - by_steps);
  return fits(tried);
}

/// See [Note: what is cheapest].
std::optional<Tried> FitSearch::cheapest() {
  const std::vector<OnDisk> all = choices();
  if (std::optional<Tried> found = cheapest_with(all.front())) return found;
  if (all.size() == 1 || !something_may_fit()) return std::nullopt;
  for (auto on_disk = std::next(all.begin()); on_disk != all.end(); ++on_disk)
    if (std::optional<Tried> found = cheapest_with(*on_disk)) return found;
  return std::nullopt;
}

std::optional<Tried> FitSearch::cheapest_with(OnDisk on_disk) {
  constexpr int kMaxRuns = 4;
  run_extra_ = 0;
  std::optional<Tried> found;
  for (int runs = 0; !found && runs < kMaxRuns; ++runs) {
    const std::optional<Tried> candidate = cheapest_by_steps(on_disk);
    if (!candidate) break;
    if (holds_in_a_run(candidate->setting)) found = tried_.at(candidate->setting);
  }
  run_extra_ = 0;
  return found;
}

std::optional<Tried> FitSearch::cheapest_by_steps(OnDisk on_disk) {
  const std::vector<int> stages = stages_for(on_disk);
  for (const int stage : stages) {
    const Setting setting = setting_of(stage, on_disk, space_.policies.front(), space_.micro_batches.front());
    if (fits(setting)) return tried_.at(setting);
  }
  if (!may_fit(on_disk)) return std::nullopt;
  std::vector<Tried> finalists;
  int64_t micro_batch = 0;
  for (const std::string& policy : space_.policies)
    if (std::optional<Tried> one = with_largest_micro_batch(stages.back(), on_disk, policy, micro_batch)) {
      micro_batch = one->setting.micro_batch;
      finalists.push_back(*one);
    }
  if (finalists.empty()) return std::nullopt;
  constexpr double kNoise = 1.1;
  double fastest = finalists.front().step_ms;
  for (const Tried& one : finalists) fastest = std::min(fastest, one.step_ms);
  return *std::find_if(finalists.begin(), finalists.end(),
                       [&](const Tried& one) { return one.step_ms <= kNoise * fastest; });
}

/// The wanted one, or else by halving, since of those that are smaller the smaller one needs less.
std::optional<Tried> FitSearch::with_largest_micro_batch(int stage, OnDisk on_disk, const std::string& policy,
                                                         int64_t more_than) {
  const auto setting = [&](size_t index) {
    return setting_of(stage, on_disk, policy, space_.micro_batches[index]);
  };
  const auto num = static_cast<size_t>(
      std::count_if(space_.micro_batches.begin(), space_.micro_batches.end(),
                    [more_than](int64_t micro_batch) { return micro_batch > more_than; }));
  if (num == 0) return std::nullopt;
  if (fits(setting(0))) return tried_.at(setting(0));
  size_t low = 1, high = num;  // the first that fits is in [low, high]
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (fits(setting(middle)))
      high = middle;
    else
      low = middle + 1;
  }
  return low == num ? std::nullopt : std::optional(tried_.at(setting(low)));
}

std::optional<Tried> FitSearch::with_most_room(const std::string& policy, bool runs) {
  const OnDisk on_disk = most_on_disk();
  const Setting setting =
      setting_of(stages_for(on_disk).back(), on_disk, policy, space_.micro_batches.front());
  if (!fits(setting) || (runs && !holds_in_a_run(setting))) return std::nullopt;
  return tried_.at(setting);
}

Tried FitSearch::least(int64_t memory_limit) {
  const int64_t given_limit = std::exchange(space_.memory_limit, memory_limit);
  trials_.set_memory_limit(memory_limit);
  run_extra_ = 0;
  std::vector<Tried> measured;
  std::vector<OnDisk> all = choices();
  // The more is on disk, the less is in memory; without room on the disk the next one is looked at.
  for (; measured.empty() && !all.empty(); all.pop_back())
    for (const Setting& setting : least_settings(all.back())) {
      if (const Tried* known = tried(setting); known != nullptr && known->is_more) tried_.erase(setting);
      const Tried& tried = consider(setting);
      if (!tried.disk_too_small && !tried.is_more && tried.growth == 0) measured.push_back(tried);
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
  run_extra_ = 0;
  space_.memory_limit = given_limit;
  trials_.set_memory_limit(given_limit);
  return least;
}

}  // namespace tessera::tools

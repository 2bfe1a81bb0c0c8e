#include "tools/memory/fit_search.h"

#include <algorithm>

#include "engine/config/sharding_plan.h"

namespace tessera::tools {
namespace {

using zero::Tier;

bool is_within(int64_t memory, int64_t limit) { return memory + reserve_of(memory) <= limit; }

}  // namespace

int64_t reserve_of(int64_t memory) {
  constexpr double kPart = 0.03;
  constexpr int64_t kLeast = 25'000'000;
  return std::max(kLeast, static_cast<int64_t>(kPart * static_cast<double>(memory)));
}

bool outgrows(const Needed& needed, int64_t limit) {
  constexpr int64_t kSteps = 100;
  return needed.growth > 0 && !is_within(needed.memory + kSteps * needed.growth, limit);
}

FitSearch::FitSearch(SearchSpace space, FitTrials& trials, SearchObserver observer)
    : space_(std::move(space)), trials_(trials), observer_(std::move(observer)) {}

/// The rungs with the stages that may have this on disk and that the disk has room for.
std::vector<FitSearch::Rung> FitSearch::ladder() {
  std::vector<Rung> rungs;
  for (const OnDisk on_disk : kAllOnDiskChoices) {
    if (!space_.disk && on_disk != OnDisk::kNothing) break;
    if (!space_.small_units && on_disk == OnDisk::kAllSmallUnits) break;
    Rung rung{on_disk, {}};
    int64_t last = INT64_MAX;
    for (const int stage : space_.stages) {
      if (!can_offload(zero::sharding_of(stage), space_.world, tiers_of(on_disk))) continue;
      const Setting setting{.stage = stage, .on_disk = on_disk, .world = space_.world};
      if (const int64_t disk = space_.state_bytes(setting, Tier::kDisk); disk > space_.disk_limit) {
        disk_missing_ = disk_missing_ == 0 ? disk : std::min(disk_missing_, disk);
        continue;
      }
      const int64_t bytes = space_.state_bytes(setting, Tier::kDevice);
      if (bytes < last) rung.stages.push_back(stage);
      last = std::min(last, bytes);
    }
    if (!rung.stages.empty()) rungs.push_back(rung);
  }
  return rungs;
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

/// What may need the least of a rung. Smaller micro-batches need less within them; a step in one micro-batch
/// needs nothing between micro-batches.
std::vector<Setting> FitSearch::least_settings(const Rung& rung) const {
  const std::string &least = space_.policies.front(), &most = space_.policies.back();
  const int64_t largest = space_.micro_batches.front(), smallest = space_.micro_batches.back();
  std::vector<Setting> settings;
  for (const auto& [policy, micro_batch] :
       {std::pair(least, smallest), std::pair(most, largest), std::pair(most, smallest)})
    if (const Setting one = setting_of(rung.stages.back(), rung.on_disk, policy, micro_batch);
        std::find(settings.begin(), settings.end(), one) == settings.end())
      settings.push_back(one);
  return settings;
}

bool FitSearch::may_fit(const Rung& rung) {
  const std::vector<Setting> settings = least_settings(rung);
  return std::any_of(settings.begin(), settings.end(), [&](const Setting& one) { return fits(one); });
}

bool FitSearch::something_may_fit() { return may_fit(ladder().back()); }

bool FitSearch::wanted_batch_fits(bool in_a_run) {
  const Rung last = ladder().back();
  const Setting setting =
      setting_of(last.stages.back(), last.on_disk, space_.policies.back(), space_.micro_batches.front());
  return fits(setting) && (!in_a_run || fits_in_a_run(setting));
}

const Tried* FitSearch::tried(const Setting& setting) const {
  const auto found = tried_.find(setting);
  return found == tried_.end() ? nullptr : &found->second;
}

const Tried& FitSearch::least_state() const {
  const auto state = [&](const auto& one) { return space_.state_bytes(one.first, Tier::kDevice); };
  return std::min_element(tried_.begin(), tried_.end(),
                          [&](const auto& a, const auto& b) { return state(a) < state(b); })
      ->second;
}

/// Measures it, unless the formula alone says that it does not fit.
const Tried& FitSearch::consider(const Setting& setting) {
  if (const Tried* known = tried(setting)) return *known;
  Tried tried{.setting = setting, .needed = {}};
  const int64_t state = space_.state_bytes(setting, Tier::kDevice);
  if (state > space_.memory_limit) {
    tried.needed = {.memory = state, .is_more = true};
  } else {
    observer_.begins(setting, false);
    tried.needed = trials_.measure(setting, space_.memory_limit);
  }
  observer_.considered(tried);
  return tried_[setting] = tried;
}

bool FitSearch::fits(const Setting& setting) {
  const Tried& tried = consider(setting);
  const Needed& needed = tried.needed;
  return !needed.is_more && !outgrows(needed, space_.memory_limit) &&
         is_within(needed.memory + (tried.is_whole_run ? 0 : run_extra_), space_.memory_limit);
}

/// A run evaluates and saves too. What does not fit then no longer counts as fitting.
bool FitSearch::fits_in_a_run(const Setting& setting) {
  Tried& tried = tried_.at(setting);
  if (trials_.simulates() || tried.is_whole_run) return fits(setting);  // simulated: no ranks to run with
  constexpr int64_t kCheckpointAndExport = 2;
  int64_t bytes = 0;
  for (const Tier tier : {Tier::kDevice, Tier::kDisk}) bytes += space_.state_bytes(setting, tier);
  observer_.begins(setting, true);
  const Needed by_steps = tried.needed;
  tried.needed =
      trials_.measure_run(setting, space_.memory_limit, kCheckpointAndExport * bytes, by_steps.step_ms);
  tried.needed.memory = std::max(tried.needed.memory, by_steps.memory);
  tried.needed.step_ms = by_steps.step_ms;
  tried.is_whole_run = true;
  if (tried.needed.growth == 0) run_extra_ = std::max(run_extra_, tried.needed.memory - by_steps.memory);
  observer_.considered(tried);
  return fits(setting);
}

/// See [Note: what is cheapest].
std::optional<Tried> FitSearch::cheapest() {
  constexpr int kMaxRuns = 4;  // of a rung
  const std::vector<Rung> rungs = ladder();
  for (size_t i = 0; i < rungs.size(); ++i) {
    run_extra_ = 0;
    if (i == 1 && !may_fit(rungs.back())) return std::nullopt;
    for (int runs = 0; runs < kMaxRuns; ++runs) {
      const std::optional<Setting> found = cheapest_by_steps(rungs[i]);
      if (!found) break;
      if (fits_in_a_run(*found)) return tried_.at(*found);
    }
  }
  return std::nullopt;
}

std::optional<Setting> FitSearch::cheapest_by_steps(const Rung& rung) {
  for (const int stage : rung.stages) {
    const Setting wanted =
        setting_of(stage, rung.on_disk, space_.policies.front(), space_.micro_batches.front());
    if (fits(wanted)) return wanted;
  }
  if (!may_fit(rung)) return std::nullopt;
  std::vector<Setting> largest;
  for (const std::string& policy : space_.policies)
    if (const std::optional<Setting> one =
            with_largest_micro_batch(rung, policy, largest.empty() ? 0 : largest.back().micro_batch))
      largest.push_back(*one);
  if (largest.empty()) return std::nullopt;
  constexpr double kNoise = 1.1;
  const auto step_ms = [&](const Setting& one) { return tried_.at(one).needed.step_ms; };
  double fastest = step_ms(largest.front());
  for (const Setting& one : largest) fastest = std::min(fastest, step_ms(one));
  return *std::find_if(largest.begin(), largest.end(),
                       [&](const Setting& one) { return step_ms(one) <= kNoise * fastest; });
}

/// The wanted one, or else by halving, since of those that are smaller the smaller one needs less.
std::optional<Setting> FitSearch::with_largest_micro_batch(const Rung& rung, const std::string& policy,
                                                           int64_t more_than) {
  const auto setting = [&](int64_t micro_batch) {
    return setting_of(rung.stages.back(), rung.on_disk, policy, micro_batch);
  };
  std::vector<int64_t> sizes = space_.micro_batches;
  std::erase_if(sizes, [&](int64_t size) { return size <= more_than; });
  if (sizes.empty()) return std::nullopt;
  if (fits(setting(sizes.front()))) return setting(sizes.front());
  const auto found = std::partition_point(sizes.begin() + 1, sizes.end(),
                                          [&](int64_t size) { return !fits(setting(size)); });
  return found == sizes.end() ? std::nullopt : std::optional(setting(*found));
}

std::optional<Tried> FitSearch::least(int64_t memory_limit) {
  space_.memory_limit = memory_limit;
  run_extra_ = 0;
  std::erase_if(tried_, [](const auto& one) { return one.second.needed.is_more; });  // by another limit
  std::vector<Tried> measured;
  for (const Setting& setting : least_settings(ladder().back()))
    if (const Tried& tried = consider(setting); !tried.needed.is_more) measured.push_back(tried);
  std::sort(measured.begin(), measured.end(),
            [](const Tried& a, const Tried& b) { return a.needed.memory < b.needed.memory; });
  for (const Tried& one : measured)
    if (fits_in_a_run(one.setting)) return tried_.at(one.setting);
  return std::nullopt;
}

}  // namespace tessera::tools

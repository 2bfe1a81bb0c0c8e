#include "tools/memory/fit_command.h"

#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <ranges>
#include <string_view>
#include <utility>

#include "core/environment/environment.h"
#include "core/error.h"
#include "core/memory/available_memory.h"
#include "core/str.h"
#include "core/terminal.h"
#include "engine/config/sharding_plan.h"
#include "tools/common/columns.h"
#include "tools/common/command_line.h"
#include "tools/memory/counted_model.h"
#include "tools/memory/fit_setting.h"
#include "tools/memory/fit_trial.h"
#include "tools/memory/trial_ranks.h"
#include "train/memory/memory_advice.h"
#include "train/run.h"
#include "train/task/trainer_config.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using train::megabytes;
using zero::Tier;

/// As --memory takes it, rounded up.
std::string whole_mb(int64_t bytes) { return str((bytes + 999'999) / 1'000'000, "MB"); }

/// The nearest folder that exists.
fs::path existing(fs::path folder) {
  folder = fs::absolute(folder);
  std::error_code error;
  while (!fs::is_directory(folder, error) && folder.has_relative_path()) folder = folder.parent_path();
  return folder;
}

/// Bytes that a file in `folder` may have. Throws ConfigError where a file would be in memory.
int64_t disk_space(const std::string& folder) {
  const fs::path place = existing(folder);
  struct statfs system{};
  constexpr auto kTmpfs = 0x01021994, kRamfs = static_cast<int>(0x858458f6);
  if (::statfs(place.c_str(), &system) == 0 &&
      (system.f_type == kTmpfs || static_cast<int>(system.f_type) == kRamfs))
    throw ConfigError("--disk ", folder, ": is in memory (tmpfs); expected a folder on a disk");
  std::error_code error;
  const fs::space_info space = fs::space(place, error);
  if (error) throw ConfigError("--disk ", folder, ": ", error.message());
  return static_cast<int64_t>(space.available);
}

/// The divisors of `samples` that are at most `wanted`, which is one; descending.
std::vector<int64_t> smaller_micro_batches(int64_t samples, int64_t wanted) {
  std::vector<int64_t> sizes;
  for (int64_t size = wanted; size >= 1; --size)
    if (samples % size == 0) sizes.push_back(size);
  return sizes;
}

/// What is kept free for what a long run adds to `memory`: malloc keeps what is freed, and how much
/// depends on the order in which threads happen to run.
int64_t reserve_of(int64_t memory) {
  constexpr double kPart = 0.03;
  constexpr int64_t kLeast = 25'000'000;
  return std::max(kLeast, static_cast<int64_t>(kPart * static_cast<double>(memory)));
}

bool is_within(int64_t memory, int64_t limit) { return memory + reserve_of(memory) <= limit; }

/// Whether it would exceed the limit if it went on growing for a hundred steps.
bool outgrows(const Needed& needed, int64_t limit) {
  constexpr int64_t kSteps = 100;
  return needed.growth > 0 && !is_within(needed.memory + kSteps * needed.growth, limit);
}

// Each recomputes more than the one before.
constexpr std::string_view kPolicies[] = {"none", "cheap", "block"};

/// Larger for settings that recompute more.
ptrdiff_t recomputation_of(const Setting& setting) {
  return std::ranges::find(kPolicies, setting.policy) - std::begin(kPolicies);
}

/// Larger for settings with more memory for what lies on disk.
int buffers_of(const Setting& setting) {
  return setting.tiers->tiers.any_on_disk() ? 3 - static_cast<int>(setting.buffers) : 0;
}

/// A setting that was considered.
struct Candidate {
  Setting setting;
  Needed needed;            ///< by a trial; or model state by formula, where that alone does not fit
  bool is_measured = true;  ///< by a trial
};

/// The command, from the flags to the file.
class Fit {
 public:
  Fit(const std::string& config, const std::vector<std::string>& overrides, const FitFlags& flags,
      const LaunchFlags& launch, const Logger& log)
      : config_(config), overrides_(overrides), flags_(flags), launch_(launch), log_(log) {
    launch_.nproc = num_ranks_ = launch.nproc.value_or(1);
  }

  int run() {
    read();
    check_fit_output(config_, output());
    model_ = count_model(config_, overrides_, log_);
    model_.async_checkpoints = model_.async_checkpoints && !on_cuda_;
    if (!on_cuda_) model_.largest_owned_bytes = 0;  // what all ranks have together counts
    print_head();
    try {
      const Candidate* const found = first_that_fits();
      if (found == nullptr) fail();
      conclude(*found);
    } catch (const TrialFailed& failed) {
      show_progress("");
      return failed.exit_code;
    }
    return 0;
  }

 private:
  struct Place {
    const train::TierSetting* tiers;
    DiskBuffers buffers;
    std::vector<int> stages = {};  ///< each needs less memory than the one before
  };
  void read();
  int64_t state_bytes(const Setting& setting, Tier tier) const;
  Setting setting_of(int stage, const Place& place, const std::string& policy, int64_t micro_batch) const;
  void add_place(Place place, std::vector<Place>& places);
  std::vector<Place> places();
  std::vector<Setting> settings_of(const Place& place) const;
  int64_t rest_of(const Setting& setting) const;
  const Candidate* find(const Setting& setting) const;
  bool fits(const Setting& setting);
  void exclude(const Setting& setting, int64_t state);
  void try_out(const Setting& setting);
  bool something_fits(const std::vector<Setting>& settings);
  const Candidate* first_that_fits();
  [[noreturn]] void fail();
  void print_head() const;
  void print_row(const Candidate& candidate) const;
  void conclude(const Candidate& found) const;
  void print_wrapped(const std::string& line) const {
    std::cout << wrap_words(line, terminal_width(STDOUT_FILENO), 2) << '\n';
  }
  fs::path output() const {
    return flags_.output.empty() ? default_fit_output(config_) : fs::path(flags_.output);
  }

  const std::string config_;
  const std::vector<std::string> overrides_;
  const FitFlags flags_;
  LaunchFlags launch_;
  const Logger log_;
  int num_ranks_ = 1;
  bool on_cuda_ = false;
  train::RunConfig run_;
  CountedModel model_;
  std::string folder_;        // for state on disk
  int64_t limit_ = 0;         // of memory: of this host's ranks, on CUDA of each rank's device
  int64_t trial_limit_ = 0;   // at which a trial ends
  int64_t disk_limit_ = 0;    // 0: nothing may lie there
  int64_t disk_missing_ = 0;  // the least that was left out because of disk_limit_; 0: nothing was
  int64_t host_missing_ = 0;  // the same of this host's memory
  std::vector<Candidate> candidates_;
  int num_trials_ = 0;
};

void Fit::read() {
  run_ = train::load_run_config(config_, num_ranks_, overrides_);
  on_cuda_ = !train::choose_device(run_.trainer, comm::environment()).is_cpu();
  if (on_cuda_ && flags_.memory.empty())
    throw ConfigError(
        "--fit: the ranks are on CUDA; expected --memory SIZE, what each may use of its device");
  limit_ = flags_.memory.empty() ? available_memory() : parse_size("--memory", flags_.memory, false);
  trial_limit_ = std::max(limit_, available_memory() / 2);
  const ZeroConfig& zero = run_.engine.zero;
  if (plan_sharding(run_.engine, num_ranks_, on_cuda_).groups != zero::GroupSizes())
    throw ConfigError(
        "--fit: zero_optimization.mics_shard_size and zero_hpz_partition_size hold copies, which it does not "
        "weigh against other settings; expected them left out, or tessera memory CONFIG, which measures "
        "them");
  const auto path =
      zero.offload_optimizer.nvme_path ? zero.offload_optimizer.nvme_path : zero.offload_param.nvme_path;
  const std::string runs = fs::path(run_.trainer.output_dir).parent_path().string();
  folder_ = !flags_.disk.empty() ? flags_.disk : path.value_or(runs.empty() ? "." : runs);
  disk_limit_ = flags_.no_disk ? 0 : disk_space(folder_);
}

/// By formula, of all ranks on this host; on CUDA of one.
int64_t Fit::state_bytes(const Setting& setting, Tier tier) const {
  const bool one_copy_a_host = !on_cuda_ && num_ranks_ > 1 && run_.trainer.backend != "gloo";
  const zero::StateBytes bytes =
      model_.bytes(setting.stage, num_ranks_, model_.accumulate, setting.tiers->tiers, tier, one_copy_a_host);
  return bytes.total() * (on_cuda_ && tier == Tier::kDevice ? 1 : num_ranks_);
}

Setting Fit::setting_of(int stage, const Place& place, const std::string& policy, int64_t micro_batch) const {
  const int64_t samples =
      run_.engine.train_micro_batch_size_per_gpu * run_.engine.gradient_accumulation_steps;
  return {.stage = stage,
          .tiers = place.tiers,
          .buffers = place.buffers,
          .policy = policy,
          .micro_batch = micro_batch,
          .accumulation = samples / micro_batch,
          .world = num_ranks_};
}

/// Where model state may lie, in the order of cost.
std::vector<Fit::Place> Fit::places() {
  std::vector<Place> places;
  for (const train::TierSetting& tiers : train::kTierSettings) {
    if (tiers.tiers.any_below_device() && tiers.tiers.device_memory_is_separate != on_cuda_) continue;
    if (tiers.tiers.any_on_disk() && flags_.no_disk) continue;
    add_place({&tiers, DiskBuffers::kAsConfigured}, places);
    if (!tiers.tiers.any_on_disk() || on_cuda_) continue;
    add_place({&tiers, DiskBuffers::kOne}, places);
    if (tiers.tiers.parameters == Tier::kDisk && run_.engine.zero.unit_numel > kSmallUnitNumel)
      add_place({&tiers, DiskBuffers::kOneOfSmallUnits}, places);
  }
  return places;
}

/// With the stages that may have model state there and that the disk has room for; none without them.
void Fit::add_place(Place place, std::vector<Place>& places) {
  int64_t last = INT64_MAX;
  for (const int stage : std::views::iota(static_cast<int>(run_.engine.zero.stage), zero::kMaxStage + 1)) {
    if (!model_.can_offload(zero::sharding_of(stage), num_ranks_, place.tiers->tiers)) continue;
    const Setting setting = setting_of(stage, place, "none", 1);
    if (const int64_t disk = state_bytes(setting, Tier::kDisk); disk > disk_limit_) {
      disk_missing_ = disk_missing_ == 0 ? disk : std::min(disk_missing_, disk);
      continue;
    }
    if (const int64_t host = state_bytes(setting, Tier::kHost); on_cuda_ && host > available_memory()) {
      host_missing_ = host_missing_ == 0 ? host : std::min(host_missing_, host);
      continue;
    }
    const int64_t bytes = state_bytes(setting, Tier::kDevice);
    if (bytes < last) place.stages.push_back(stage);
    last = std::min(last, bytes);
  }
  if (!place.stages.empty()) places.push_back(std::move(place));
}

/// See [Note: what costs least].
std::vector<Setting> Fit::settings_of(const Place& place) const {
  const int64_t wanted = run_.engine.train_micro_batch_size_per_gpu;
  std::vector<Setting> settings;
  for (const int stage : place.stages) settings.push_back(setting_of(stage, place, "none", wanted));
  for (const int64_t size : smaller_micro_batches(wanted * run_.engine.gradient_accumulation_steps, wanted))
    for (const std::string_view policy : kPolicies)
      if (size < wanted || policy != kPolicies[0])
        settings.push_back(setting_of(place.stages.back(), place, std::string(policy), size));
  return settings;
}

/// What it needs beside model state, at least, by the trials that recompute as much or more and have no
/// larger buffers, and no less model state in memory: what is gathered of the rest counts beside it there.
/// With a smaller micro-batch what a process has before it makes a model stays, and the rest shrinks in
/// proportion at most.
int64_t Fit::rest_of(const Setting& setting) const {
  int64_t rest = 0;
  for (const Candidate& one : candidates_) {
    const int64_t state = state_bytes(one.setting, Tier::kDevice);
    if (!one.is_measured || recomputation_of(one.setting) < recomputation_of(setting) ||
        buffers_of(one.setting) > buffers_of(setting) || state < state_bytes(setting, Tier::kDevice))
      continue;
    const int64_t all = one.needed.memory - state;
    const int64_t batch = std::max(setting.micro_batch, one.setting.micro_batch);
    const int64_t part = (all - one.needed.idle) * setting.micro_batch / batch;
    rest = std::max(rest, setting.micro_batch < batch ? one.needed.idle + part : all);
  }
  return rest;
}

const Candidate* Fit::find(const Setting& setting) const {
  const auto found = std::ranges::find(candidates_, setting, &Candidate::setting);
  return found == candidates_.end() ? nullptr : &*found;
}

/// Tries it, unless the formulas say that it does not fit, or it was.
bool Fit::fits(const Setting& setting) {
  if (find(setting) == nullptr) {
    const int64_t state = state_bytes(setting, Tier::kDevice);
    if (!is_within(state, limit_)) {
      exclude(setting, state);
      return false;
    }
    if (!is_within(state + rest_of(setting), limit_)) return false;
    try_out(setting);
  }
  const Needed& needed = find(setting)->needed;
  return !needed.is_more && !outgrows(needed, limit_) && is_within(needed.memory, limit_);
}

/// Says so once for a stage and a place: nothing fits there.
void Fit::exclude(const Setting& setting, int64_t state) {
  for (const Candidate& one : candidates_)
    if (!one.is_measured && one.needed.memory == state && one.setting.tiers == setting.tiers) return;
  candidates_.push_back(
      {.setting = setting, .needed = {.memory = state, .is_more = true}, .is_measured = false});
  print_row(candidates_.back());
}

void Fit::try_out(const Setting& setting) {
  show_progress(str("trial ", ++num_trials_, ": ", in_words(setting)));
  std::vector<std::string> overrides = overrides_;
  for (const std::string& one : overrides_of(setting, folder_)) overrides.push_back(one);
  constexpr int64_t kCheckpointAndExport = 2;
  const int64_t state = state_bytes(setting, Tier::kDevice) + state_bytes(setting, Tier::kDisk);
  const Needed needed = run_fit_trial({.config = config_,
                                       .overrides = std::move(overrides),
                                       .launch = launch_,
                                       .on_cuda = on_cuda_,
                                       .memory_limit = trial_limit_,
                                       .disk_bytes = kCheckpointAndExport * state},
                                      log_);
  show_progress("");
  candidates_.push_back({.setting = setting, .needed = needed});
  print_row(candidates_.back());
}

/// Whether something of a place fits, by what needs least there: whole blocks recomputed, in the smallest
/// micro-batch, or in the wanted one, where nothing is kept between micro-batches.
bool Fit::something_fits(const std::vector<Setting>& settings) {
  const auto wanted =
      std::ranges::find_if(settings, [](const Setting& one) { return one.policy == kPolicies[2]; });
  return fits(settings.back()) || fits(*wanted);
}

const Candidate* Fit::first_that_fits() {
  const std::vector<Place> all = places();
  for (size_t i = 0; i < all.size(); ++i) {
    // Before all that lies below is tried one by one, what needs least of it is; and so in each place.
    if (i == 1 && !something_fits(settings_of(all.back()))) return nullptr;
    const std::vector<Setting> settings = settings_of(all[i]);
    for (size_t k = 0; k < settings.size(); ++k) {
      if (k == all[i].stages.size() && !something_fits(settings)) break;
      if (fits(settings[k])) return find(settings[k]);
    }
  }
  return nullptr;
}

/// One line that says what would be needed.
void Fit::fail() {
  const std::string limit = str("--memory ", flags_.memory.empty() ? megabytes(limit_) : flags_.memory);
  std::string below;  // what was left out
  if (disk_missing_ > 0)
    below += str(", and state on disk needs ", megabytes(disk_missing_), " in ", folder_, ", which has ",
                 megabytes(disk_limit_), " free");
  if (host_missing_ > 0)
    below += str(", and state in the host's memory needs ", megabytes(host_missing_), ", of which ",
                 megabytes(available_memory()), " are free");
  const auto needs_less = [](const Candidate& a, const Candidate& b) {
    return a.needed.memory < b.needed.memory;
  };
  std::vector<Candidate> measured = candidates_;
  std::erase_if(measured,
                [&](const Candidate& one) { return one.needed.is_more || outgrows(one.needed, limit_); });
  if (!measured.empty()) {
    const Candidate& least = *std::ranges::min_element(measured, needs_less);
    throw ConfigError(limit, ": no setting fits; the least limit that was found is ",
                      whole_mb(least.needed.memory + reserve_of(least.needed.memory)), " (",
                      in_words(least.setting), ")", below);
  }
  if (num_trials_ > 0)
    throw ConfigError(limit,
                      ": no setting fits; each that was tried grew, ran out of memory, or was ended at ",
                      megabytes(trial_limit_), below);
  const Candidate& least = *std::ranges::min_element(candidates_, needs_less);
  throw ConfigError(limit, ": no setting fits; model state alone needs ",
                    whole_mb(least.needed.memory + reserve_of(least.needed.memory)), " (",
                    in_words(least.setting), ")", below);
}

void Fit::print_head() const {
  const std::string who = on_cuda_          ? str("each of ", num_ranks_, " ranks on its device")
                          : num_ranks_ == 1 ? "1 rank"
                                            : str(num_ranks_, " ranks on this host");
  print_wrapped(str("Memory of ", who, ", ", format_count(model_.num_trainable + model_.num_frozen),
                    " parameters, ", model_.precision, ", ", model_.optimizer, "; at most ",
                    megabytes(limit_)));
  std::cout << '\n'
            << padded_right("model state", 35) << padded_left("stage", 6) << "  " << padded_right("policy", 7)
            << padded_left("batch", 8) << padded_left("MB", 9) << padded_left("step, s", 8) << std::endl;
}

void Fit::print_row(const Candidate& candidate) const {
  const Setting& setting = candidate.setting;
  const Needed& needed = candidate.needed;
  const std::string mb = fixed(static_cast<double>(needed.memory) / 1e6, 0);
  std::cout << padded_right(place_of(setting), 35) << padded_left(std::to_string(setting.stage), 6) << "  "
            << padded_right(setting.policy, 7)
            << padded_left(str(setting.micro_batch, "x", setting.accumulation * setting.world), 8)
            << padded_left(needed.memory == 0 ? "-"
                           : needed.is_more   ? ">" + mb
                                              : mb,
                           9)
            << padded_left(outgrows(needed, limit_) ? "grows"
                           : needed.memory == 0     ? "failed"
                           : needed.is_more         ? "-"
                                                    : fixed(needed.step_s, 2),
                           8)
            << std::endl;  // trials take long
}

void Fit::conclude(const Candidate& found) const {
  const int64_t on_disk = state_bytes(found.setting, Tier::kDisk);
  std::cout << '\n';
  print_wrapped(str(
      "Chosen: ", in_words(found.setting), ": ", megabytes(found.needed.memory), " of ", megabytes(limit_),
      found.needed.without_checkpoint ? ", measured in a short run without a checkpoint (TMPDIR has no room)"
                                      : ", measured in a short run",
      on_disk == 0 ? "" : str(", and ", megabytes(on_disk), " on disk (", folder_, ")"), "."));
  print_wrapped(candidates_.size() == 1 ? "Why: nothing costs less, and it fits."
                                        : "Why: what costs less does not fit.");
  write_fit_config(config_, overrides_, found.setting, folder_, output());
  print_wrapped(str("Written: ", output()));
}

}  // namespace

int run_fit(const std::string& config, const std::vector<std::string>& overrides, const FitFlags& flags,
            const LaunchFlags& launch, const Logger& log) {
  return Fit(config, overrides, flags, launch, log).run();
}

}  // namespace tessera::tools

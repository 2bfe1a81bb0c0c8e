#include "tools/memory/fit_command.h"

#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <numeric>
#include <optional>
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
#include "tools/memory/fit_search.h"
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

/// The command, from the flags to the file.
class Fit {
 public:
  Fit(const std::string& config, const std::vector<std::string>& overrides, const FitFlags& flags,
      const LaunchFlags& launch, const Logger& log)
      : config_(config), overrides_(overrides), flags_(flags), launch_(launch), log_(log) {}

  int run() {
    const int num_ranks = flags_.fewest_ranks ? 1 : launch_.nproc.value_or(1);
    read(num_ranks);
    check_fit_output(config_, output());
    model_ = count_model(config_, overrides_, log_);
    print_head(num_ranks);
    FitTrials trials({.config = config_,
                      .overrides = overrides_,
                      .disk_folder = folder_,
                      .launch = launch_,
                      .simulate = flags_.fewest_ranks},
                     log_);
    trials_ = &trials;
    search_.emplace(space_, trials, observer());
    try {
      const std::optional<Tried> found = flags_.fewest_ranks    ? fewest_ranks()
                                         : flags_.largest_batch ? largest_batch()
                                         : flags_.least_memory  ? search(space_).least(limit_)
                                                                : search(space_).cheapest();
      if (!found) fail();
      conclude(*found);
    } catch (const TrialFailed& failed) {
      clear_progress();
      return failed.exit_code;
    }
    return 0;
  }

 private:
  void read(int num_ranks);
  SearchObserver observer() const;
  FitSearch& search(const SearchSpace& space) {
    search_->set_space(space);
    return *search_;
  }
  std::optional<Tried> fewest_ranks();
  std::optional<Tried> largest_batch();
  [[noreturn]] void fail();
  void print_head(int num_ranks) const;
  void print_row(const Tried& tried) const;
  void conclude(const Tried& found) const;
  std::string why(const Tried& found) const;
  void print_wrapped(const std::string& line) const {
    std::cout << wrap_words(line, terminal_width(STDOUT_FILENO), 2) << '\n';
  }
  void clear_progress() const {
    if (::isatty(STDERR_FILENO) != 0)
      std::cerr << '\r' << std::string(terminal_width(STDERR_FILENO) - 1, ' ') << '\r' << std::flush;
  }
  void show_progress(const Setting& setting, bool is_whole_run) const;
  fs::path output() const {
    return flags_.output.empty() ? default_fit_output(config_) : fs::path(flags_.output);
  }

  const std::string config_;
  const std::vector<std::string> overrides_;
  const FitFlags flags_;
  const LaunchFlags launch_;
  const Logger log_;
  train::RunConfig run_;
  CountedModel model_;
  std::string folder_;  // for state on disk
  int64_t limit_ = 0;   // of memory
  SearchSpace space_;
  FitTrials* trials_ = nullptr;
  std::optional<FitSearch> search_;
};

/// Fills in `run_`, `folder_`, `limit_` and `space_`.
void Fit::read(int num_ranks) {
  limit_ = flags_.memory.empty() ? available_memory() : parse_size("--memory", flags_.memory, false);
  run_ = train::load_run_config(config_, num_ranks, overrides_);
  if (!train::choose_device(run_.trainer, comm::environment()).is_cpu())
    throw ConfigError(
        "--fit: the ranks would be on CUDA, and it measures ranks on the CPU; expected --set "
        "trainer.device=cpu, or tessera memory CONFIG, which measures on CUDA");
  const ZeroConfig& zero = run_.engine.zero;
  if (plan_sharding(run_.engine, flags_.fewest_ranks ? 2 : num_ranks, false).groups != zero::GroupSizes())
    throw ConfigError(
        "--fit: zero_optimization.mics_shard_size and zero_hpz_partition_size hold copies, which it does not "
        "weigh against other settings; expected them left out, or tessera memory CONFIG, which measures "
        "them");
  const auto path =
      zero.offload_optimizer.nvme_path ? zero.offload_optimizer.nvme_path : zero.offload_param.nvme_path;
  const std::string runs = fs::path(run_.trainer.output_dir).parent_path().string();
  folder_ = !flags_.disk.empty() ? flags_.disk : path.value_or(runs.empty() ? "." : runs);
  space_.stages.resize(zero::kMaxStage + 1 - zero.stage);
  std::iota(space_.stages.begin(), space_.stages.end(), static_cast<int>(zero.stage));
  space_.policies = {"none", "cheap", "block"};
  const int64_t micro_batch = run_.engine.train_micro_batch_size_per_gpu;
  space_.samples_of_a_step = micro_batch * run_.engine.gradient_accumulation_steps;
  space_.micro_batches = smaller_micro_batches(space_.samples_of_a_step, micro_batch);
  space_.world = num_ranks;
  space_.disk = !flags_.no_disk;
  space_.small_units = zero.unit_numel > kSmallUnitNumel;
  space_.memory_limit = limit_;
  space_.disk_limit = flags_.no_disk ? 0 : disk_space(folder_);
  const bool shared = num_ranks > 1 && run_.trainer.backend != "gloo";
  space_.state_bytes = [this, shared, num_ranks](const Setting& setting, Tier tier) {
    return num_ranks * model_
                           .bytes(setting.stage, setting.world, model_.accumulate_dtype,
                                  tiers_of(setting.on_disk), tier, shared)
                           .total();
  };
}

void Fit::show_progress(const Setting& setting, bool is_whole_run) const {
  if (::isatty(STDERR_FILENO) == 0) return;
  const std::string line =
      str("trial ", trials_->num_trials() + 1, ": ", is_whole_run ? "run, " : "", in_words(setting));
  std::cerr << line.substr(0, terminal_width(STDERR_FILENO) - 1) << std::flush;
}

SearchObserver Fit::observer() const {
  return {.begins = [this](const Setting& setting, bool is_run) { show_progress(setting, is_run); },
          .considered =
              [this](const Tried& tried) {
                clear_progress();
                print_row(tried);
              }};
}

/// Brings what fits and what does not nearer to each other, to an eighth.
void bisect(int64_t& good, int64_t& bad, const std::function<bool(int64_t)>& fits) {
  while (std::abs(good - bad) > std::max<int64_t>(1, std::max(good, bad) / 8)) {
    const int64_t middle = (good + bad) / 2;
    (fits(middle) ? good : bad) = middle;
  }
}

std::optional<Tried> Fit::fewest_ranks() {
  constexpr int kMost = 4096;
  const auto with = [&](int64_t world) -> FitSearch& {
    SearchSpace space = space_;
    space.world = static_cast<int>(world);
    return search(space);
  };
  int64_t too_few = 0, world = 1;
  for (; !with(world).something_may_fit(); world *= 2) {
    if (2 * world > kMost) return std::nullopt;
    too_few = world;
  }
  bisect(world, too_few, [&](int64_t ranks) { return with(ranks).something_may_fit(); });
  return with(world).cheapest();
}

std::optional<Tried> Fit::largest_batch() {
  const auto with = [&](int64_t micro_batch) -> FitSearch& {
    SearchSpace space = space_;
    space.micro_batches = {micro_batch};
    return search(space);
  };
  const auto fits = [&](int64_t size) { return with(size).wanted_batch_fits(/*in_a_run=*/false); };
  const int64_t wanted = space_.micro_batches.front(), most = model_.train_size / space_.world;
  int64_t size = wanted, too_large = most + 1;
  if (with(wanted).wanted_batch_fits(/*in_a_run=*/true)) {
    while (size < most && too_large > most) {
      const int64_t next = std::min(4 * size, most);
      (fits(next) ? size : too_large) = next;
    }
    bisect(size, too_large, fits);
  }
  constexpr int kMaxSizes = 3;  // a run with a larger one may need more beside its steps, too
  for (int sizes = 0; size > wanted && sizes < kMaxSizes; ++sizes, size -= std::max<int64_t>(1, size / 8))
    if (const std::optional<Tried> found = with(size).cheapest()) return found;
  return search(space_).cheapest();  // which may have a smaller one
}

/// One line that says what would be needed.
void Fit::fail() {
  const std::string limit = str("--memory ", flags_.memory.empty() ? megabytes(limit_) : flags_.memory);
  const int64_t disk = search_->least_disk_missing();
  const std::string on_disk = disk == 0 ? ""
                                        : str(", and state on disk needs ", megabytes(disk), " in ", folder_,
                                              ", which has ", megabytes(space_.disk_limit), " free");
  if (trials_->num_trials() == 0) {  // what could be measured takes minutes, and is far from the limit
    const Setting& least = search_->least_state().setting;
    throw ConfigError(limit, ": no setting fits; model state alone needs ",
                      whole_mb(space_.state_bytes(least, Tier::kDevice)), " (", in_words(least), ")", on_disk,
                      "; --least-memory measures what a run needs");
  }
  const std::optional<Tried> least = search_->least(std::max(limit_, available_memory()));
  clear_progress();
  throw ConfigError(
      limit, ": no setting fits; ",
      least ? str("the least limit that was found is ",
                  whole_mb(least->needed.memory + reserve_of(least->needed.memory)), " (",
                  in_words(least->setting), ")")
            : str("none was found within the ", megabytes(available_memory()), " that this machine has free"),
      on_disk);
}

void Fit::print_head(int num_ranks) const {
  const std::string who = flags_.fewest_ranks ? "a rank alone on its host"
                          : num_ranks == 1    ? "1 rank"
                                              : str(num_ranks, " ranks on this host");
  print_wrapped(str("Memory of ", who, ", ", format_count(model_.num_trainable + model_.num_frozen),
                    " parameters, ", model_.precision, ", ", model_.optimizer, "; at most ",
                    megabytes(limit_)));
  std::cout << '\n'
            << padded_right("on disk", 20) << padded_left("stage", 6) << "  " << padded_right("policy", 7)
            << padded_left("batch", 8) << padded_left("MB", 9) << padded_left("step, s", 8) << std::endl;
}

void Fit::print_row(const Tried& tried) const {
  const Setting& setting = tried.setting;
  const Needed& needed = tried.needed;
  const std::string mb = fixed(static_cast<double>(needed.memory) / 1e6, 0);
  std::cout << padded_right(name_of(setting.on_disk), 20) << padded_left(std::to_string(setting.stage), 6)
            << "  " << padded_right(setting.policy, 7)
            << padded_left(str(setting.micro_batch, "x", setting.accumulation * setting.world), 8)
            << padded_left(needed.is_more ? ">" + mb : mb, 9)
            << padded_left(outgrows(needed, limit_) ? "grows"
                           : tried.is_whole_run     ? "run"
                           : needed.step_ms == 0    ? "-"
                                                    : fixed(needed.step_ms / 1e3, 2),
                           8)
            << std::endl;  // trials take long
}

/// The time of a step beside that of the configuration as it is, if both were measured.
std::string Fit::why(const Tried& found) const {
  std::string text = flags_.fewest_ranks    ? "Why: with fewer ranks, found by halving, it does not fit."
                     : flags_.largest_batch ? "Why: by what was measured, larger micro-batches do not fit."
                     : flags_.least_memory  ? "Why: of what was measured it needs the least."
                                            : "Why: what costs less does not fit.";
  Setting first{.stage = space_.stages.front(),
                .policy = space_.policies.front(),
                .micro_batch = space_.micro_batches.front(),
                .world = space_.world};
  first.accumulation = space_.samples_of_a_step / first.micro_batch;
  const Tried* const as_it_is = search_->tried(first);
  if (found.setting == first) return "Why: nothing costs less, and it fits.";
  const double step_ms = found.needed.step_ms;
  if (step_ms == 0) return text;
  text += str(" A step takes ", fixed(step_ms / 1e3, 2), " s");
  if (as_it_is != nullptr && as_it_is->needed.step_ms > 0 && !flags_.largest_batch)
    text += str(", ", fixed(step_ms / as_it_is->needed.step_ms, 2), " times that in memory");
  return text + ".";
}

void Fit::conclude(const Tried& found) const {
  clear_progress();
  write_fit_config(config_, overrides_, found.setting, folder_, output());
  const int64_t on_disk = space_.state_bytes(found.setting, Tier::kDisk);
  std::cout << '\n';
  print_wrapped(str("Chosen: ", in_words(found.setting), ": ", megabytes(found.needed.memory), " of ",
                    megabytes(limit_),
                    found.is_whole_run ? ", measured in a short run" : ", measured in a simulated rank",
                    on_disk == 0 ? "" : str(", and ", megabytes(on_disk), " on disk (", folder_, ")"), "."));
  print_wrapped(why(found));
  const int64_t batch = found.setting.micro_batch * found.setting.accumulation * found.setting.world;
  if (batch != run_.engine.train_batch_size && !flags_.fewest_ranks)
    print_wrapped(str("The batch of a step is now ", batch, ", not ", run_.engine.train_batch_size, "."));
  print_wrapped(str("Written: ", output()));
}

}  // namespace

int run_fit(const std::string& config, const std::vector<std::string>& overrides, const FitFlags& flags,
            const LaunchFlags& launch, const Logger& log) {
  return Fit(config, overrides, flags, launch, log).run();
}

}  // namespace tessera::tools

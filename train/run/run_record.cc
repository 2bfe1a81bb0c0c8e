#include "train/run/run_record.h"

#include <nlohmann/json.hpp>

#include "comm/init/agreement.h"
#include "core/error.h"
#include "core/json/json_text.h"
#include "core/random_digits.h"
#include "core/str.h"
#include "train/report/monitoring.h"
#include "train/run/run_checkpoints.h"

namespace tessera::train {

void RunRecord::do_on_rank_0(const std::function<void()>& part) {
  comm::from_rank_0<ConfigError>(comm_, "output folder", [&] { return part(), ""; });
}

std::string RunRecord::open(const TrainerConfig& config, bool resume, bool must_have_a_run) {
  return comm::from_rank_0<ConfigError>(comm_, "output folder", [&] {
    if (must_have_a_run) check_has_a_run(config);
    directory_.emplace(config.output_dir);  // takes the lock before anything in the folder is read
    if (!resume) check_no_unfinished_run(config);
    if (const std::string& missing = directory_->lock().missing(); !missing.empty())
      log_.warning(str("trainer.output_dir: ", config.output_dir, " cannot be locked (", missing,
                       "): a second run there would not be detected"));
    if (!resume) return random_digits(kRunIdBytes);
    try {
      return read_run_id(config.output_dir);
    } catch (const Error& error) {  // it protects from mistakes, and must not end a run
      log_.warning(str(error.what(), "; the checkpoint's is taken"));
      return std::string();
    }
  });
}

void RunRecord::begin(const RunConfig& run, const std::string& run_id, std::optional<int64_t> resumed_after,
                      const std::vector<std::pair<std::string, std::string>>& files) {
  do_on_rank_0([&] {
    if (resumed_after) {
      if (const std::string damage = directory_->resume(*resumed_after); !damage.empty())
        log_.warning(damage);
    } else {
      set_aside_checkpoints(run.trainer.output_dir);
      directory_->begin();
    }
    directory_->write(kRunIdName, run_id + "\n");
    directory_->write(kConfigName, dump_resolved(run));
    monitors_ = open_monitors(run, resumed_after, log_);
    for (const auto& [name, content] : files) directory_->write(name, content);
  });
}

std::vector<std::string> RunRecord::files(
    const RunConfig& run, const std::vector<std::pair<std::string, std::string>>& task_files) const {
  if (!directory_) return {};
  const std::filesystem::path& folder = directory_->folder();
  std::vector<std::filesystem::path> paths;
  for (const char* name : {kConfigName, kMetricsName, kStateName, kResultsName})
    paths.push_back(folder / name);
  for (const auto& [name, content] : task_files) paths.push_back(folder / name);
  for (const char* name : {kCheckpointsName, kSamplesName}) paths.push_back(folder / name);
  for (const std::filesystem::path& path : monitor_paths(run)) paths.push_back(path);

  std::vector<std::string> files;
  std::error_code error;
  for (const std::filesystem::path& path : paths) {
    if (!std::filesystem::exists(path, error)) continue;
    const std::filesystem::path inside = path.lexically_relative(folder);
    std::string name = (inside.empty() || inside.native().starts_with("..") ? path : inside).string();
    if (std::filesystem::is_directory(path, error) && !name.ends_with('/')) name += "/";
    files.push_back(std::move(name));
  }
  return files;
}

bool RunRecord::exists(const char* name) const {
  std::error_code error;
  const bool mine = directory_ && std::filesystem::exists(directory_->folder() / name, error);
  return comm_.exchange(mine, name).front();
}

bool RunRecord::has_results() const { return exists(kResultsName); }
bool RunRecord::has_model() const { return exists(kModelName); }

void RunRecord::log_metrics(const nlohmann::ordered_json& record) {
  if (!directory_) return;
  directory_->append_metrics(record);
  monitors_.scalars(record.at("step"), scalars_of(record));
}

void RunRecord::write_state(const TrainerState& state) {
  if (!directory_) return;
  try {
    directory_->write(kStateName, json_text(to_json(state, directory_->metrics()), 2) + "\n");
  } catch (const Error& error) {  // training continues, as without a checkpoint
    log_.warning(error.what());
  }
}

void RunRecord::write_results(const Summary& summary) {
  if (!directory_) return;
  directory_->write(kResultsName, json_text(to_json(summary), 2) + "\n");
  monitors_.artifact(directory_->folder() / kResultsName);
}

void RunRecord::log_histograms(int64_t step, const std::vector<NamedHistogram>& histograms) {
  for (const NamedHistogram& one : histograms) monitors_.histogram(one.name, step, one.histogram);
}

void RunRecord::log_samples(int64_t step, const std::vector<SampleFile>& samples) {
  for (const SampleFile& sample : samples)
    monitors_.sample(str(kSamplesName, "/", sample.name), step, sample.file);
}

}  // namespace tessera::train

#include "train/run_record.h"

#include <nlohmann/json.hpp>

#include "comm/agreement.h"
#include "core/error.h"
#include "core/str.h"
#include "train/monitoring.h"
#include "train/run_checkpoints.h"

namespace tessera::train {

void RunRecord::on_rank_0(const std::function<void()>& part) {
  comm::from_rank_0<ConfigError>(comm_, "output folder", [&] { return part(), ""; });
}

void RunRecord::open(const TrainerConfig& config, bool resume) {
  on_rank_0([&] {
    if (!resume) check_may_start_anew(config);
    directory_.emplace(config.output_dir);
  });
}

void RunRecord::begin(const RunConfig& run, std::optional<int64_t> resumed_after, const std::vector<std::pair<std::string, std::string>>& files) {
  on_rank_0([&] {
    if (resumed_after) {
      directory_->go_on(*resumed_after);
    } else {
      set_aside_checkpoints(run.trainer.output_dir);
      directory_->begin();
    }
    directory_->write(kConfigName, dump_resolved(run));
    monitors_ = open_monitors(run, resumed_after, log_);
    for (const auto& [name, content] : files) directory_->write(name, content);
  });
}

bool RunRecord::is_there(const char* name) const {
  std::error_code error;
  const bool mine = directory_ && std::filesystem::exists(directory_->folder() / name, error);
  return !comm_.exchange(mine ? "there" : "", name).front().empty();
}

bool RunRecord::has_results() const { return is_there(kResultsName); }
bool RunRecord::has_model() const { return is_there(kModelName); }

void RunRecord::numbers(const nlohmann::ordered_json& record) {
  if (!directory_) return;
  directory_->append_metrics(record);
  monitors_.scalars(record.at("step"), scalars_of(record));
}

void RunRecord::state(const TrainerState& state) {
  if (!directory_) return;
  try {
    directory_->write(kStateName, to_json(state, directory_->metrics()).dump(2) + "\n");
  } catch (const Error& error) {  // as a checkpoint that cannot be written: training goes on
    log_.warning(error.what());
  }
}

void RunRecord::results(const Summary& summary) {
  if (!directory_) return;
  directory_->write(kResultsName, to_json(summary).dump(2) + "\n");
  monitors_.artifact(directory_->folder() / kResultsName);
}

void RunRecord::histograms(int64_t step, const std::vector<NamedHistogram>& histograms) {
  for (const NamedHistogram& one : histograms) monitors_.histogram(one.name, step, one.histogram);
}

void RunRecord::samples(int64_t step, const std::vector<SampleFile>& samples) {
  for (const SampleFile& sample : samples) monitors_.sample(str(kSamplesName, "/", sample.name), step, sample.file);
}

}  // namespace tessera::train

// What a run tells its user and its files: the numbers, and how they are written. No state, no collectives.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "core/memory_use.h"
#include "train/evaluate.h"
#include "train/step_meter.h"

namespace tessera::train {

/// The steps since the last report.
struct StepReport {
  int64_t step = 0;  ///< optimizer steps done
  int64_t total_steps = 0;
  double epoch = 0;          ///< passes over the data done
  double loss = 0;           ///< mean over the window and the ranks
  double learning_rate = 0;  ///< of the first param group
  double gradient_norm = 0;
  double samples_per_s = 0;  ///< over all ranks
  int world_size = 1;
  int64_t skipped_steps = 0;                               ///< since the beginning
  std::optional<double> loss_scale;                        ///< fp16 only, autocast included
  std::optional<std::array<double, kNumPhases>> phase_ms;  ///< wall_clock_breakdown only
  std::optional<MemoryBytes> memory_peak;  ///< of this rank, since the last report; memory_breakdown only
};

/// The whole run. Training time leaves evaluations out.
struct Summary {
  std::string task;
  int64_t num_steps = 0;
  double num_epochs = 0;
  int64_t num_samples = 0;  ///< seen in training, repetitions counted
  double train_loss = 0;    ///< mean over all steps and ranks
  double train_s = 0;
  int64_t skipped_steps = 0;
  int world_size = 1;
  int stage = 0;
  std::optional<Evaluation> evaluation;  ///< of the set that is evaluated on the way, with the weights the
                                         ///< run ends with; none without one
  std::optional<Evaluation> test;        ///< the same of a task that has a test set besides
  std::optional<int64_t> model_step;  ///< whose weights these are of, which are those that the run ends with;
                                      ///< none where nothing was measured
  std::string folder;                 ///< where the files lie
  std::vector<std::string> files;  ///< in it, the model left out: "config.json", "samples/" …; elsewhere: the
                                   ///< whole path. Known to rank 0
  std::string model;               ///< the exported model, within the folder; empty: none
  std::string model_metric;        ///< "accuracy 0.9183 at step 1404"; empty: it is the last
  bool was_finished = false;       ///< before it was resumed: nothing was trained
  std::string stopped_early;       ///< "no better accuracy in 3 evaluations"; empty: it was not
  std::string interrupted;  ///< the checkpoint from which a run that was ended early goes on; else empty

  double samples_per_s() const {
    return train_s > 0 ? static_cast<double>(num_samples) / train_s : 0.0;
  }  ///< over all ranks
  double samples_per_s_per_rank() const { return samples_per_s() / world_size; }
};

/// Local. "step 50/1404 | epoch 0.11 | loss 0.7421 | lr 3.6e-04 | grad norm 1.92 | 2310 samples/s", with the
/// loss scale in fp16, skipped steps if there were any, and a second line for each breakdown.
std::string format_line(const StepReport& report);
/// Local. "parameters 134.7 | gradients 67.4 | …", in MB (10^6 bytes), with the total;
/// uses of which there is nothing left out.
std::string format_memory(const MemoryBytes& bytes);
/// Local. What follows a progress bar: "loss=0.742, lr=3.6e-04".
std::string format_postfix(const StepReport& report);
/// Local. "1 step", "1,404 steps".
std::string counted(int64_t count, const char* noun);
/// Local. "epoch 1.00 | eval accuracy 0.8912 | eval loss 0.3012 | 10,000 samples in 1.2 s".
std::string format_line(const Evaluation& evaluation, double epoch);
/// Local. The task's report, and "eval     accuracy 0.9123, loss 0.2500, on 10,000 test samples".
std::string format_result(const Evaluation& evaluation);
inline constexpr int kSummaryIndent = 9;  ///< behind the word that a line of format_summary() begins with
/// Local. A few lines for the end of a run.
std::string format_summary(const Summary& summary);

/// Local. Records of metrics.jsonl, and all_results.json, under the names of Hugging Face's Trainer.
nlohmann::ordered_json to_json(const StepReport& report);
/// Local. Bytes by the uses' keys, and their total.
nlohmann::ordered_json to_json(const MemoryBytes& bytes);
nlohmann::ordered_json to_json(const Evaluation& evaluation, int64_t step, double epoch);
/// Local. "eval_accuracy": 0.91 …, of the test set "test_accuracy" …, with the
/// number of samples and the time they took.
void add_evaluation(const Evaluation& evaluation, nlohmann::ordered_json& record);
nlohmann::ordered_json to_json(const Summary& summary);

}  // namespace tessera::train

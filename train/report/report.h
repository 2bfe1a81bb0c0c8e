// The results that a run reports, and their formats on the screen and in files. No state, no collectives.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "core/memory/memory_use.h"
#include "train/report/evaluate.h"
#include "train/report/step_meter.h"

namespace tessera::train {

/// The steps since the last report.
struct StepReport {
  int64_t step = 0;  ///< optimizer steps done
  int64_t total_steps = 0;
  double epoch = 0;          ///< epochs done
  double loss = 0;           ///< mean over the window and the ranks
  double learning_rate = 0;  ///< of the first param group
  double gradient_norm = 0;
  double samples_per_s = 0;  ///< over all ranks
  int world_size = 1;
  std::optional<double> tflops;  ///< model TFLOP/s of this rank; flops_profiler only, once a step was counted
  std::optional<double> mfu;     ///< of flops_profiler.peak_tflops, if given
  int64_t skipped_steps = 0;     ///< since the start of the run
  std::optional<double> loss_scale;                        ///< fp16 only, autocast included
  std::optional<std::array<double, kNumPhases>> phase_ms;  ///< wall_clock_breakdown only
  std::optional<MemoryBytes> memory_peak;  ///< of this rank, since the last report; memory_breakdown only
};

/// Results of the whole run.
struct Summary {
  std::string task;
  int64_t num_steps = 0;
  double num_epochs = 0;
  int64_t num_samples = 0;  ///< trained on, each repetition counted
  double train_loss = 0;    ///< mean over all steps and ranks
  double train_s = 0;       ///< training time in seconds, without evaluations
  int64_t skipped_steps = 0;
  int world_size = 1;
  int stage = 0;
  std::optional<Evaluation> evaluation;  ///< of the evaluation set, with the final weights (the exported
                                         ///< ones); unset for a task without one
  std::optional<Evaluation> test;        ///< of the test set, with the final weights; unset without one
  std::optional<int64_t> model_step;     ///< the step of the final weights; unset if nothing was evaluated
  std::string folder;                    ///< the output folder
  std::vector<std::string> files;        ///< the run's files except the model, rank 0 only: "config.json",
                                         ///< "samples/" …, relative to the folder if they are in it
  std::string model;                     ///< the exported model, relative to the folder; empty: none
  std::string model_metric;              ///< "accuracy 0.9183 at step 1404"; empty: the last step's weights
  bool was_finished = false;             ///< the resumed run had finished: nothing was trained
  std::string stopped_early;             ///< "no better accuracy in 3 evaluations"; empty: not stopped early
  std::string interrupted;               ///< the checkpoint to resume from, of an interrupted run; else empty

  double samples_per_s() const {
    return train_s > 0 ? static_cast<double>(num_samples) / train_s : 0.0;
  }  ///< over all ranks
  double samples_per_s_per_rank() const { return samples_per_s() / world_size; }
};

/// "step 50/1404 | epoch 0.11 | loss 0.7421 | lr 3.6e-04 | grad norm 1.92 | 2310 samples/s". Adds the
/// loss scale in fp16, the skipped steps if there are any, and a line for each breakdown.
std::string format_line(const StepReport& report);
/// "parameters 134.7 | gradients 67.4 | …", in MB (10^6 bytes), with the total,
/// without the uses that are 0.
std::string format_memory(const MemoryBytes& bytes);
/// The progress bar's postfix: "loss=0.742, lr=3.6e-04".
std::string format_postfix(const StepReport& report);
/// "1 step", "1,404 steps".
std::string counted(int64_t count, const char* noun);
/// "epoch 1.00 | eval accuracy 0.8912 | eval loss 0.3012 | 10,000 samples in 1.2 s".
std::string format_line(const Evaluation& evaluation, double epoch);
/// The task's report, if any, and "eval     accuracy 0.9123, loss 0.2500, on 10,000 test samples".
std::string format_result(const Evaluation& evaluation);
/// Width of the label at the start of each line of format_summary().
inline constexpr int kSummaryIndent = 9;
/// The lines printed at the end of a run.
std::string format_summary(const Summary& summary);

/// A record of metrics.jsonl, under the names of Hugging Face's Trainer, as all JSON below.
nlohmann::ordered_json to_json(const StepReport& report);
/// Bytes by use, and their total.
nlohmann::ordered_json to_json(const MemoryBytes& bytes);
/// A record of metrics.jsonl.
nlohmann::ordered_json to_json(const Evaluation& evaluation, int64_t step, double epoch);
/// Adds "eval_accuracy" … (of a test set "test_accuracy" …), the number of samples and the time.
void add_evaluation(const Evaluation& evaluation, nlohmann::ordered_json& record);
/// The contents of all_results.json.
nlohmann::ordered_json to_json(const Summary& summary);

}  // namespace tessera::train

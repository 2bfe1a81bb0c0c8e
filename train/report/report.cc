#include "train/report/report.h"

#include <nlohmann/json.hpp>

#include "core/str.h"

namespace tessera::train {
namespace {

using nlohmann::ordered_json;

long long number(int64_t value) { return static_cast<long long>(value); }

constexpr std::array<const char*, kNumPhases> kPhaseNames = {"data", "forward", "backward", "step"};

/// "1,404 steps (3 epochs)"
std::string length_of(const Summary& summary) {
  const std::string epochs = printed("%.4g", summary.num_epochs);
  return counted(summary.num_steps, "step") + " (" + epochs + (epochs == "1" ? " epoch)" : " epochs)");
}

/// "training loss 0.3012 over 1,404 steps (3 epochs) in 59.5 s" and, on the next line,
/// "speed    3,019 samples/s (1,509 a rank)"
std::string training_lines(const Summary& summary) {
  std::string text = printed("training loss %.4f over ", summary.train_loss) + length_of(summary) +
                     printed(" in %.1f s", summary.train_s);
  if (summary.skipped_steps > 0) text += ", " + format_count(summary.skipped_steps) + " skipped";
  text += "\nspeed    " + format_count(static_cast<int64_t>(summary.samples_per_s())) + " samples/s";
  return summary.world_size == 1
             ? text
             : text + " (" + format_count(static_cast<int64_t>(summary.samples_per_s_per_rank())) +
                   " a rank)";
}

}  // namespace

std::string counted(int64_t count, const char* noun) {
  return format_count(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string format_line(const StepReport& report) {
  std::string line = printed("step %lld/%lld | epoch %.2f | loss %.4f | lr %.1e | grad norm %.2f",
                             number(report.step), number(report.total_steps), report.epoch, report.loss,
                             report.learning_rate, report.gradient_norm);
  if (report.loss_scale) line += printed(" | loss scale %g", *report.loss_scale);
  line += printed(" | %.0f samples/s", report.samples_per_s);
  if (report.tflops) line += printed(" | %.3g TFLOP/s a rank", *report.tflops);
  if (report.mfu) line += printed(" | MFU %.1f %%", 100 * *report.mfu);
  if (report.skipped_steps > 0) line += printed(" | skipped %lld", number(report.skipped_steps));
  if (report.phase_ms) {
    line += "\n  time (ms)";
    for (size_t i = 0; i < kNumPhases; ++i)
      line += printed(" | %s %.2f", kPhaseNames[i], (*report.phase_ms)[i]);
  }
  if (report.memory_peak) line += "\n  memory at the peak (MB) | " + format_memory(*report.memory_peak);
  return line;
}

std::string format_memory(const MemoryBytes& bytes) {
  std::string text;
  for (size_t use = 0; use < kNumMemoryUses; ++use)
    if (bytes.by_use[use] != 0)
      text += std::string(name_of(static_cast<MemoryUse>(use))) +
              printed(" %.1f | ", static_cast<double>(bytes.by_use[use]) / 1e6);
  return text + printed("total %.1f", static_cast<double>(bytes.total()) / 1e6);
}

std::string format_postfix(const StepReport& report) {
  std::string text = printed("loss=%.3f, lr=%.1e", report.loss, report.learning_rate);
  if (report.skipped_steps > 0) text += printed(", skipped=%lld", number(report.skipped_steps));
  return text;
}

std::string format_line(const Evaluation& evaluation, double epoch) {
  std::string line = printed("epoch %.2f", epoch);
  for (const auto& [name, value] : evaluation.metrics)
    line += str(" | ", evaluation.name(), " ", name, printed(" %.4f", value));
  return line + " | " + counted(evaluation.num_samples, "sample") + printed(" in %.1f s", evaluation.seconds);
}

std::string format_result(const Evaluation& evaluation) {
  std::string text = evaluation.report.empty() ? "" : evaluation.report + "\n";
  text += printed("%-8s ", evaluation.name());
  for (const auto& [name, value] : evaluation.metrics) text += name + printed(" %.4f, ", value);
  return text + "on " + counted(evaluation.num_samples, (evaluation.set + " sample").c_str());
}

std::string format_summary(const Summary& summary) {
  std::string text;
  if (const auto& last = summary.test ? summary.test : summary.evaluation)
    text += format_result(*last) + "\n";
  if (summary.was_finished) {
    text += "already finished after " + length_of(summary) + "; to continue training, raise " +
            (summary.stopped_early.empty() ? "trainer.epochs or trainer.max_steps"
                                           : "trainer.early_stopping_patience");
    if (summary.skipped_steps > 0) text += ", " + format_count(summary.skipped_steps) + " skipped";
  } else {
    text += training_lines(summary);
  }
  if (!summary.stopped_early.empty()) text += "\nstopped  early: " + summary.stopped_early;
  text += printed("\nranks    %d, ZeRO stage %d", summary.world_size, summary.stage);
  if (!summary.interrupted.empty())
    return text + "\nstopped  saved in " + summary.interrupted +
           "\n         resume with: the same command and --resume";
  if (!summary.model.empty())
    text += "\nmodel    " + summary.folder + "/" + summary.model +
            (summary.model_metric.empty() ? "" : " (" + summary.model_metric + ")");
  return text + "\nfiles    " + summary.folder + "/{" + join(summary.files, ", ") + "}";
}

void add_evaluation(const Evaluation& evaluation, ordered_json& record) {
  const std::string prefix = str(evaluation.name(), "_");
  for (const auto& [name, value] : evaluation.metrics) record[prefix + name] = value;
  record[prefix + "samples"] = evaluation.num_samples;
  record[prefix + "runtime"] = evaluation.seconds;
  record[prefix + "samples_per_second"] = static_cast<double>(evaluation.num_samples) / evaluation.seconds;
}

ordered_json to_json(const MemoryBytes& bytes) {
  ordered_json json;
  for (size_t use = 0; use < kNumMemoryUses; ++use)
    json[std::string(key_of(static_cast<MemoryUse>(use)))] = bytes.by_use[use];
  json["total"] = bytes.total();
  return json;
}

ordered_json to_json(const StepReport& report) {
  ordered_json record;
  record["step"] = report.step;
  record["epoch"] = report.epoch;
  record["loss"] = report.loss;
  record["learning_rate"] = report.learning_rate;
  record["grad_norm"] = report.gradient_norm;
  if (report.loss_scale) record["loss_scale"] = *report.loss_scale;
  record["samples_per_second"] = report.samples_per_s;
  record["samples_per_second_per_rank"] = report.samples_per_s / report.world_size;
  if (report.tflops) record["tflops_per_rank"] = *report.tflops;
  if (report.mfu) record["mfu"] = *report.mfu;
  record["skipped_steps"] = report.skipped_steps;
  if (report.memory_peak) record["memory_peak_bytes"] = to_json(*report.memory_peak);
  if (report.phase_ms) {
    for (size_t i = 0; i < kNumPhases; ++i) record[str(kPhaseNames[i], "_ms")] = (*report.phase_ms)[i];
  }
  return record;
}

ordered_json to_json(const Evaluation& evaluation, int64_t step, double epoch) {
  ordered_json record;
  record["step"] = step;
  record["epoch"] = epoch;
  add_evaluation(evaluation, record);
  return record;
}

ordered_json to_json(const Summary& summary) {
  ordered_json results;
  results["task"] = summary.task;
  results["epoch"] = summary.num_epochs;
  results["train_steps"] = summary.num_steps;
  results["train_samples"] = summary.num_samples;
  results["train_loss"] = summary.train_loss;
  results["train_runtime"] = summary.train_s;
  results["train_samples_per_second"] = summary.samples_per_s();
  results["train_samples_per_second_per_rank"] = summary.samples_per_s_per_rank();
  results["train_steps_per_second"] =
      summary.train_s > 0 ? static_cast<double>(summary.num_steps) / summary.train_s : 0.0;
  results["skipped_steps"] = summary.skipped_steps;
  if (!summary.stopped_early.empty()) results["stopped_early"] = summary.stopped_early;
  results["world_size"] = summary.world_size;
  results["zero_stage"] = summary.stage;
  if (summary.model_step) results["model_step"] = *summary.model_step;
  if (summary.evaluation) add_evaluation(*summary.evaluation, results);
  if (summary.test) add_evaluation(*summary.test, results);
  return results;
}

}  // namespace tessera::train

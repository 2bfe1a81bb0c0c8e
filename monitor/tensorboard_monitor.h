// TensorboardMonitor: event files for TensorBoard, as torch.utils.tensorboard writes them.
#pragma once

#include <optional>

#include "monitor/event_file.h"
#include "monitor/monitor.h"

namespace tessera {

/// Writes for TensorBoard: one event file in FOLDER: scalars, histograms, images (PNG), texts, and the
/// parameters as a text. TensorBoard stops showing an earlier run in the folder, or, of a resumed run, the
/// steps after `resumed_after`: the file has its first step, as with a SummaryWriter's purge_step. Owns the
/// open file.
class TensorboardMonitor final : public Monitor {
 public:
  TensorboardMonitor(const std::filesystem::path& folder, std::optional<int64_t> resumed_after);

  std::string_view name() const override { return "tensorboard"; }
  void scalars(int64_t step, const Scalars& scalars) override;
  void histogram(const std::string& name, int64_t step, const Histogram& histogram) override;
  void image(const std::string& name, int64_t step, const PngView& png) override;
  void text(const std::string& name, int64_t step, const std::string& text) override;
  void params(const nlohmann::ordered_json& params) override;
  void close(RunStatus /*status*/) override {}  // every event is written at once

 private:
  int64_t first_step_;
  EventFile file_;
};

}  // namespace tessera

// TensorboardMonitor: event files for TensorBoard, as torch.utils.tensorboard writes them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "core/files/disk.h"
#include "monitor/monitor.h"

namespace tessera {

class ProtoMessage;

/// Writes for TensorBoard: one event file FOLDER/events.out.tfevents.TIME.HOST.PID.NUMBER: scalars,
/// histograms, images (PNG), texts, and the parameters as a text. TensorBoard stops showing an earlier run in
/// the folder, or, of a resumed run, the steps after `resumed_after`: the file has its first step, as with a
/// SummaryWriter's purge_step. Owns the open file.
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
  /// Appends a tensorflow.Event with the current time: `what` is its field `field`. It is written at once, so
  /// that TensorBoard sees it, and it stays when the run is killed.
  void write(int64_t step, int field, const ProtoMessage& what);
  /// Appends an event of one value.
  void write_value(int64_t step, const std::string& tag, ProtoMessage content);
  void append(const ProtoMessage& event);

  int64_t first_step_;
  Disk disk_{DiskOptions{.sync = false, .probe = {}}};
  OutputFile file_;
};

}  // namespace tessera

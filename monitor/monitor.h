// Monitor: a place a run's numbers go to besides its own metrics.jsonl: files
// other programs read, or a tracking server.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "monitor/histogram.h"
#include "monitor/png.h"

namespace tessera {

/// Names and values of one step, e.g. {{"train/loss", 0.31}, {"train/learning_rate", 1e-3}}.
using Scalars = std::vector<std::pair<std::string, double>>;

/// How a run came to its end.
enum class RunStatus {
  kFinished,
  kFailed,  ///< an error ended it
  kKilled,  ///< it was told to end early
};

/// Local. MLflow's words: "FINISHED", "FAILED", "KILLED".
std::string_view name_of(RunStatus status);

/// Owns its files or connection. One thread uses it; what it does in the background is its own matter. All
/// members are local (rank 0 has monitors, others have none) and throw tessera::Error, after which it is not
/// used any more, close() included. A monitor that has no place for a histogram, an image, a text,
/// parameters or a file leaves them out.
class Monitor {
 public:
  virtual ~Monitor() = default;

  /// The name of its section in the configuration.
  virtual std::string_view name() const = 0;
  virtual void scalars(int64_t step, const Scalars& scalars) = 0;
  virtual void histogram(const std::string& /*name*/, int64_t /*step*/, const Histogram& /*histogram*/) {}
  virtual void image(const std::string& /*name*/, int64_t /*step*/, const PngView& /*png*/) {}
  /// UTF-8.
  virtual void text(const std::string& /*name*/, int64_t /*step*/, const std::string& /*text*/) {}
  /// What the run was configured with, an object of any depth.
  virtual void params(const nlohmann::ordered_json& /*params*/) {}
  /// A file the run has written.
  virtual void artifact(const std::filesystem::path& /*file*/) {}
  /// The last call. Destroying a monitor that was not closed closes it as
  /// kFailed where that makes a difference.
  virtual void close(RunStatus status) = 0;
};

}  // namespace tessera

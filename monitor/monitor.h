// Monitor: writes a run's numbers, in addition to its metrics.jsonl, to files for other programs or to a
// tracking server.
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

/// How a run ended.
enum class RunStatus {
  kFinished,
  kFailed,  ///< an error ended it
  kKilled,  ///< it ended early on request
};

/// MLflow's words: "FINISHED", "FAILED", "KILLED".
std::string_view name_of(RunStatus status);

/// Takes a run's numbers, pictures and texts. Owns its files or connection. Used by one thread; a monitor may
/// have threads of its own. Only rank 0 has monitors. All members throw tessera::Error, after which the
/// monitor is not used again, not even closed. A monitor that cannot hold histograms, images, texts,
/// parameters or files ignores them.
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
  /// The resolved configuration, an object of any depth.
  virtual void params(const nlohmann::ordered_json& /*params*/) {}
  /// A file the run has written.
  virtual void artifact(const std::filesystem::path& /*file*/) {}
  /// The last call. The destructor of a monitor that was not closed closes it as kFailed, if the status is
  /// recorded.
  virtual void close(RunStatus status) = 0;
};

}  // namespace tessera

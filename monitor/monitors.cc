#include "monitor/monitors.h"

#include <exception>

#include "core/files/disk.h"
#include "core/str.h"
#include "core/utf8.h"
#include "monitor/histogram.h"

namespace tessera {

std::string_view name_of(RunStatus status) {
  switch (status) {
    case RunStatus::kFinished: return "FINISHED";
    case RunStatus::kFailed: return "FAILED";
    case RunStatus::kKilled: return "KILLED";
  }
  return "";
}

static void warn(const Logger& log, std::string_view monitor, const std::exception& error) {
  log.warning(str(monitor, ": ", error.what(), "; the run goes on without it"));
}

void Monitors::open(std::string_view name, const std::function<std::unique_ptr<Monitor>()>& make) {
  try {
    monitors_.push_back(make());
  } catch (const ConfigError&) {
    throw;
  } catch (const std::exception& error) {
    warn(log_, name, error);
  }
}

Monitors& Monitors::operator=(Monitors&& other) noexcept {
  if (this != &other) {
    close(RunStatus::kFailed);
    monitors_ = std::move(other.monitors_);
    log_ = std::move(other.log_);
  }
  return *this;
}

Monitors::~Monitors() { close(RunStatus::kFailed); }

void Monitors::tell(const std::function<void(Monitor&)>& what) {
  std::erase_if(monitors_, [&](const std::unique_ptr<Monitor>& monitor) {
    try {
      what(*monitor);
      return false;
    } catch (const std::exception& error) {
      warn(log_, monitor->name(), error);
      return true;
    }
  });
}

void Monitors::scalars(int64_t step, const Scalars& scalars) {
  tell([&](Monitor& monitor) { monitor.scalars(step, scalars); });
}

void Monitors::histogram(const std::string& name, int64_t step, const Histogram& histogram) {
  tell([&](Monitor& monitor) { monitor.histogram(name, step, histogram); });
}

void Monitors::histogram(const std::string& name, int64_t step, std::span<const float> values) {
  if (empty()) return;
  HistogramCounts counts;
  counts.add(values);
  histogram(name, step, counts.histogram());
}

/// An image or file that cannot be read is not an error of the monitors.
void Monitors::or_warn(const std::string& name, const std::function<void()>& what) {
  if (empty()) return;
  try {
    what();
  } catch (const std::exception& error) {
    log_.warning(str("monitors: ", name, " is left out: ", error.what()));
  }
}

void Monitors::text(const std::string& name, int64_t step, const std::string& text) {
  const std::string valid = as_utf8(text);
  tell([&](Monitor& monitor) { monitor.text(name, step, valid); });
}

void Monitors::sample(const std::string& name, int64_t step, const std::filesystem::path& file) {
  constexpr int64_t kLongestFile = int64_t{1} << 28;
  or_warn(name, [&] {
    const std::string content = InputFile(file).read_all(kLongestFile);
    if (file.extension() != ".png") return text(name, step, content);
    PngView png = png_view(content);
    png.file = file;
    tell([&](Monitor& monitor) { monitor.image(name, step, png); });
  });
}

void Monitors::params(const nlohmann::ordered_json& params) {
  tell([&](Monitor& monitor) { monitor.params(params); });
}

void Monitors::artifact(const std::filesystem::path& file) {
  tell([&](Monitor& monitor) { monitor.artifact(file); });
}

void Monitors::close(RunStatus status) {
  tell([&](Monitor& monitor) { monitor.close(status); });
  monitors_.clear();
}

}  // namespace tessera

// Monitors: several monitors that are called as one.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/log.h"
#include "monitor/monitor.h"

namespace tessera {

/// Gives what it is told to each open monitor. Owns the monitors that are open: rank 0 has some, the other
/// ranks none. Used by one thread. An error of a monitor never ends a run: a monitor that fails, when it is
/// opened or later, is dropped with one warning, and nothing here throws, but for open().
class Monitors {
 public:
  explicit Monitors(Logger log = {}) : log_(std::move(log)) {}
  Monitors(Monitors&& other) = default;
  Monitors& operator=(Monitors&& other) noexcept;
  /// Closes as kFailed, unless close() was called.
  ~Monitors();

  /// Adds the monitor that make() returns; a monitor of one's own is a class derived from Monitor.
  /// `name`: for the warning, if make() throws. Throws a ConfigError of make(): what is asked for cannot be
  /// had.
  void open(std::string_view name, const std::function<std::unique_ptr<Monitor>()>& make);

  bool empty() const { return monitors_.empty(); }
  /// Does what Monitor's member of this name does, for all monitors.
  void scalars(int64_t step, const Scalars& scalars);
  void histogram(const std::string& name, int64_t step, const Histogram& histogram);
  /// Of those values that are finite.
  void histogram(const std::string& name, int64_t step, std::span<const float> values);
  /// Encoded once for all monitors. An image that cannot be encoded is left out with a warning.
  void image(const std::string& name, int64_t step, const ImageView& image);
  void text(const std::string& name, int64_t step, const std::string& text);
  /// A file to view: a .png as an image, any other file as text. One that cannot be read is
  /// left out with a warning. The file must stay where it is.
  void sample(const std::string& name, int64_t step, const std::filesystem::path& file);
  void params(const nlohmann::ordered_json& params);
  void artifact(const std::filesystem::path& file);
  void close(RunStatus status);

 private:
  void tell(const std::function<void(Monitor&)>& what);
  void or_warn(const std::string& name, const std::function<void()>& what);

  std::vector<std::unique_ptr<Monitor>> monitors_;
  Logger log_;
};

}  // namespace tessera

// PyEngine: an Engine whose model is an nn.Module that Python holds.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "engine/engine.h"
#include "zero/gathered_parameters.h"

namespace tessera::python {

/// Owns what Engine does, and no object of Python but tensors. The caller sets the module's mode itself, and
/// reports parameters that have changed. Used by one thread.
class PyEngine final : public Engine {
 public:
  /// Collective. See tessera::initialize().
  PyEngine(const zero::ModelView& model, const EngineConfig& config, comm::CommunicatorPtr comm,
           const InitOptions& options)
      : Engine(model, config, std::move(comm), options) {}

  using Engine::check_same_parameters;
  using Engine::prepare_tensor;

  /// Must be called around the module's forward, on one thread. Collective in evaluation. Throws Error for a
  /// forward inside of another one.
  void begin_forward();
  void end_forward(const std::vector<at::Tensor>& results);
  /// Is called after a forward that has thrown.
  void leave_forward() { scope_.reset(); }
  bool in_forward() const { return scope_.has_value(); }

  /// A name in the file and the further names of a tied one; a parameter's name in the model, or a buffer;
  /// the type in the file.
  using SavedTensor = std::tuple<std::string, std::vector<std::string>, std::variant<std::string, at::Tensor>,
                                 at::ScalarType>;
  /// Collective. Writes parameters and buffers to one safetensors file (or .pt, .h5, by the name's ending);
  /// rank 0 writes, unit by unit. `tensors`: in the order of the file. Throws CheckpointError and DiskError,
  /// the same on all ranks.
  void save_model(const std::string& path, const std::vector<SavedTensor>& tensors);

 private:
  void set_training(bool) override {}
  std::optional<std::vector<zero::NamedTensor>> changed_parameters(
      const std::vector<zero::NamedTensor>&) const override {
    return std::nullopt;
  }
  std::optional<ForwardScope> scope_;
};

}  // namespace tessera::python

// ScriptEngine: a TorchScript model in an engine, optionally with another trace of it for evaluation.
//
// A trace has one mode.
// A trace keeps the dropout of the mode it was made in. So a traced model may come as two files, of
// which the second is for evaluation. Its parameters and buffers are replaced by the first's, tensor
// by tensor: the engine shards one model, and at stage 3 an operator that reads them has them
// gathered, whichever module it belongs to.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "examples/torchscript/script_model.h"

namespace tessera::examples {

enum class ForwardMode { kTraining, kEvaluation };

/// Owns the modules and the engine. Used by one thread.
class ScriptEngine {
 public:
  /// Opens model.path, and model.eval_path unless it is empty. Throws DataError.
  ScriptEngine(const std::string& path, const std::string& eval_path);
  ~ScriptEngine();

  /// Check_arguments() of each module. Throws DataError.
  void check_arguments(const CallOfForward& call) const;

  /// Collective. To be called once. Throws as tessera::initialize, and DataError if a file was changed since
  /// it was opened. Afterwards nothing depends on the files.
  Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm, const InitOptions& options);
  Engine& engine() const;

  /// Collective at stage 3. Returns the output of the model's forward. Throws what it throws.
  c10::IValue forward(std::vector<c10::IValue> arguments, ForwardMode mode);

  bool has_evaluation() const { return evaluation_ != nullptr; }
  /// The file of the module that `mode` runs, for messages.
  const std::string& path(ForwardMode mode) const {
    return mode == ForwardMode::kEvaluation && evaluation_ ? eval_path_ : path_;
  }

 private:
  std::string path_, eval_path_;
  std::unique_ptr<ScriptFile> training_file_, evaluation_file_;  // until initialize()
  std::shared_ptr<torch::jit::Module> training_, evaluation_;  // evaluation_: null without a file of its own
  std::vector<at::Tensor> own_buffers_;                        // of evaluation_ alone
  std::unique_ptr<TypedEngine<torch::jit::Module>> engine_;
};

}  // namespace tessera::examples

// Runs a trained TorchScript model on the tensors of a file.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "examples/torchscript/options.h"
#include "examples/torchscript/script_engine.h"
#include "train/task/predictor.h"

namespace tessera::examples {

/// Needs the model's file and the names of its inputs, not its training data.
class TensorsPredictor final : public train::Predictor {
 public:
  /// Throws DataError.
  explicit TensorsPredictor(const TensorsOptions& options);

  Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                     const InitOptions& options) override;
  /// All tensors forward gives that have a row for each sample, floating ones in fp32. Into
  /// .csv: a column for each element of a row.
  std::vector<train::PredictedTensor> predict_file(const train::PredictFileOptions& options) override;

 private:
  TensorsOptions options_;
  ScriptEngine model_;
};

}  // namespace tessera::examples

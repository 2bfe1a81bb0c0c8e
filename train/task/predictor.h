// Predictor: runs a trained model on single texts, or on the samples of a file, without its training data.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace tessera::train {

/// A model's output for one text.
struct Prediction {
  std::string line;               ///< to print: "pos 0.9312"
  nlohmann::ordered_json answer;  ///< as transformers' pipelines return it: {"label": "pos", "score": 0.9312}
};

/// A file of samples and the file for the outputs.
struct PredictFileOptions {
  std::string input, output;
  int64_t batch_size = 1;
  std::function<void(int64_t done, int64_t total)> progress = {};  ///< counts are samples
};

/// A tensor in the output file.
struct PredictedTensor {
  std::string name;
  std::vector<int64_t> shape;  ///< (samples, …)
};

/// Predicts with a trained model. Owns the model and its engine. Implementations take either texts or files.
/// Used by one thread.
class Predictor {
 public:
  virtual ~Predictor() = default;
  /// Collective. Builds the model and its engine, as Task::initialize does. To be called once.
  virtual Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                             const InitOptions& options) = 0;
  /// Collective at stage 3. One prediction for each text (UTF-8), in order. To be called in evaluation mode.
  /// Throws ConfigError if the model does not take texts.
  virtual std::vector<Prediction> predict(const std::vector<std::string>& texts);
  /// Is for one rank with the whole model. Writes the output file and returns the tensors it holds. Must be
  /// called in evaluation mode. Throws DataError, DiskError; ConfigError if the model takes texts.
  virtual std::vector<PredictedTensor> predict_file(const PredictFileOptions& options);
};

}  // namespace tessera::train

// Predictor: answers of a trained model, without the data it was trained on: for
// single texts, or for the samples of a file.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace tessera::train {

/// What a model makes of one text.
struct Prediction {
  std::string line;  ///< for people: "pos 0.9312"
  nlohmann::ordered_json
      answer;  ///< for programs, as transformers' pipelines answer: {"label": "pos", "score": 0.9312}
};

/// A file of samples, and where what the model makes of them goes.
struct PredictFileOptions {
  std::string input, output;
  int64_t batch_size = 1;
  std::function<void(int64_t done, int64_t total)> progress = {};  ///< hears samples
};

/// A tensor in the output.
struct PredictedTensor {
  std::string name;
  std::vector<int64_t> shape;  ///< (samples, …)
};

/// Owns the model and its engine, and answers for texts or for files. One thread uses it.
class Predictor {
 public:
  virtual ~Predictor() = default;
  /// Collective. Builds the model and wraps it, once, as Task::initialize does.
  virtual Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                             const InitOptions& options) = 0;
  /// Collective at stage 3. One answer for each text (UTF-8), in order. To be called in evaluation mode.
  /// Throws ConfigError where the model does not take texts.
  virtual std::vector<Prediction> predict(const std::vector<std::string>& texts);
  /// Local: one rank has the whole model. What the output holds once it is written. To be called in
  /// evaluation mode. Throws DataError, DiskError; ConfigError where the model takes texts.
  virtual std::vector<PredictedTensor> predict_file(const PredictFileOptions& options);
};

}  // namespace tessera::train

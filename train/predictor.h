// Predictor: answers for single texts, from a trained model, without the data it was trained on.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace tessera::train {

/// What a model makes of one text.
struct Prediction {
  std::string line;              ///< for people: "pos 0.9312"
  nlohmann::ordered_json answer;  ///< for programs, as transformers' pipelines answer: {"label": "pos", "score": 0.9312}
};

/// Owns the model and its engine. One thread uses it.
class Predictor {
 public:
  virtual ~Predictor() = default;
  /// Collective. Builds the model and wraps it, once, as Task::initialize does.
  virtual Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm, const InitOptions& options) = 0;
  /// Collective at stage 3. One answer for each text (UTF-8), in order. To be called in evaluation mode.
  virtual std::vector<Prediction> predict(const std::vector<std::string>& texts) = 0;
};

}  // namespace tessera::train

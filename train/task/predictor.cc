#include "train/task/predictor.h"

#include "core/error.h"

namespace tessera::train {

std::vector<Prediction> Predictor::predict(const std::vector<std::string>&) {
  throw ConfigError(
      "this run's model takes tensors, not texts; expected --file FILE.safetensors and --out FILE");
}

std::vector<PredictedTensor> Predictor::predict_file(const PredictFileOptions&) {
  throw ConfigError(
      "this run's model takes texts, not tensors, and its answers are printed; expected --text TEXT, or "
      "--file FILE with a text a line, and no --out");
}

}  // namespace tessera::train

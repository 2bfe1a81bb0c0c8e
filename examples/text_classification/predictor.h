// Classifies texts with a trained BERT.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "examples/text_classification/task.h"
#include "train/task/predictor.h"

namespace tessera::examples {

/// Predictions have the format of transformers' text-classification pipeline: {"label": "pos", "score":
/// 0.93}, the most likely label and its probability.
class TextClassificationPredictor final : public train::Predictor {
 public:
  /// `vocabulary`: the vocab.txt the model was trained with. Throws DataError;
  /// ConfigError if it does not fit the model.
  TextClassificationPredictor(const TextClassificationOptions& options,
                              const std::filesystem::path& vocabulary);

  Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                     const InitOptions& options) override;
  std::vector<train::Prediction> predict(const std::vector<std::string>& texts) override;

 private:
  std::vector<train::Prediction> predict_batch(const EncodedTexts& texts,
                                               const std::vector<int64_t>& indices);

  TextClassificationOptions options_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<TypedEngine<BertForSequenceClassificationImpl>> engine_;
};

}  // namespace tessera::examples

// Continues a text with a trained byte-level language model.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "examples/language_model/task.h"
#include "train/task/predictor.h"

namespace tessera::examples {

/// Predictions have the format of transformers' text-generation pipeline: {"generated_text": …}, the text
/// followed by data.sample_bytes sampled bytes, at data.temperature. Bytes that are not UTF-8 become U+FFFD.
class LanguageModelPredictor final : public train::Predictor {
 public:
  /// Throws ConfigError if data.sample_bytes is 0.
  explicit LanguageModelPredictor(const LanguageModelOptions& options);

  Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                     const InitOptions& options) override;
  std::vector<train::Prediction> predict(const std::vector<std::string>& texts) override;

 private:
  LanguageModelOptions options_;
  std::unique_ptr<TypedEngine<GptImpl>> engine_;
};

}  // namespace tessera::examples

// How a text goes on, by a trained language model of bytes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "examples/language_model/task.h"
#include "train/predictor.h"

namespace tessera::examples {

/// Answers as transformers' text-generation pipeline: {"generated_text": …}, the text and data.sample_bytes
/// drawn after it, at data.temperature; bytes that are no UTF-8 become U+FFFD.
class LanguageModelPredictor final : public train::Predictor {
 public:
  /// Local. Throws ConfigError where data.sample_bytes is 0.
  explicit LanguageModelPredictor(const LanguageModelOptions& options);

  Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                     const InitOptions& options) override;
  std::vector<train::Prediction> predict(const std::vector<std::string>& texts) override;

 private:
  LanguageModelOptions options_;
  std::unique_ptr<TypedEngine<GptImpl>> engine_;
};

}  // namespace tessera::examples

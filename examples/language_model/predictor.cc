#include "examples/language_model/predictor.h"

#include <utility>

#include "core/error.h"

namespace tessera::examples {

LanguageModelPredictor::LanguageModelPredictor(const LanguageModelOptions& options) : options_(options) {
  if (options.sample.num_bytes == 0)
    throw ConfigError(
        "data.sample_bytes: found 0, so that nothing would be drawn; expected more (--set "
        "data.sample_bytes=100)");
}

Engine& LanguageModelPredictor::initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                                           const InitOptions& options) {
  engine_ = tessera::initialize([this] { return Gpt(options_.model); }, config, std::move(comm), options);
  return *engine_;
}

std::vector<train::Prediction> LanguageModelPredictor::predict(const std::vector<std::string>& texts) {
  for (size_t i = 0; i < texts.size(); ++i)  // before any text is processed
    if (texts[i].empty())
      throw DataError("text ", i + 1, " is empty; expected at least one character to continue");
  std::vector<train::Prediction> predictions;
  for (const std::string& text : texts) {
    SampleOptions sample = options_.sample;
    sample.prompt = text;
    const std::string drawn =
        sample_text([this](const at::Tensor& bytes) { return engine_->forward(bytes); }, sample);
    predictions.push_back({text + drawn, {{"generated_text", text + drawn}}});
  }
  return predictions;
}

}  // namespace tessera::examples

#include "examples/language_model/predictor.h"

#include <utility>

#include "core/error.h"

namespace tessera::examples {

Engine& LanguageModelPredictor::initialize(const EngineConfig& config, comm::CommunicatorPtr comm, const InitOptions& options) {
  Gpt model(options_.model);
  model->to(options.device);
  engine_ = tessera::initialize(model, config, std::move(comm), options);
  return *engine_;
}

std::vector<train::Prediction> LanguageModelPredictor::predict(const std::vector<std::string>& texts) {
  std::vector<train::Prediction> predictions;
  for (const std::string& text : texts) {
    if (text.empty()) throw DataError("a text is empty; expected at least one character to go on from");
    SampleOptions sample = options_.sample;
    sample.prompt = text;
    const std::string drawn = sample_text([this](const at::Tensor& bytes) { return engine_->forward(bytes.to(engine_->device())); }, sample);
    predictions.push_back({text + drawn, {{"generated_text", text + drawn}}});
  }
  return predictions;
}

}  // namespace tessera::examples

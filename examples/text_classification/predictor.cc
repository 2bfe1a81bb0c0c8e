#include "examples/text_classification/predictor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/str.h"

namespace tessera::examples {

constexpr int64_t kBatchSize = 64;

TextClassificationPredictor::TextClassificationPredictor(const TextClassificationOptions& options,
                                                         const std::filesystem::path& vocabulary)
    : options_(options), tokenizer_(make_tokenizer(options, Vocabulary::read(vocabulary.string()))) {
  fit_to_vocabulary(options_.model, tokenizer_->vocabulary());
}

Engine& TextClassificationPredictor::initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                                                const InitOptions& options) {
  engine_ = tessera::initialize([this] { return BertForSequenceClassification(options_.model); }, config,
                                std::move(comm), options);
  return *engine_;
}

std::vector<train::Prediction> TextClassificationPredictor::predict_batch(
    const EncodedTexts& texts, const std::vector<int64_t>& indices) {
  const PaddedTexts rows = texts.batch(indices, tokenizer_->vocabulary().pad(), options_.max_length);
  const at::NoGradGuard no_grad;
  const at::Tensor logits = engine_->forward(rows.input_ids, rows.attention_mask);   // (B, labels)
  const auto [scores, labels] = logits.to(at::kCPU, at::kDouble).softmax(1).max(1);  // (B), (B)
  std::vector<train::Prediction> predictions;
  for (int64_t i = 0; i < scores.size(0); ++i) {
    const std::string& label = options_.labels[static_cast<size_t>(labels[i].item<int64_t>())];
    const double score = scores[i].item<double>();
    predictions.push_back({label + printed(" %.4f", score), {{"label", label}, {"score", score}}});
  }
  return predictions;
}

std::vector<train::Prediction> TextClassificationPredictor::predict(const std::vector<std::string>& texts) {
  EncodedTexts encoded;
  for (const std::string& text : texts) encoded.add(tokenizer_->encode(text, options_.max_length));
  std::vector<train::Prediction> predictions;
  for (int64_t begin = 0; begin < encoded.size(); begin += kBatchSize) {
    std::vector<int64_t> indices(static_cast<size_t>(std::min(kBatchSize, encoded.size() - begin)));
    std::iota(indices.begin(), indices.end(), begin);
    for (train::Prediction& prediction : predict_batch(encoded, indices))
      predictions.push_back(std::move(prediction));
  }
  return predictions;
}

}  // namespace tessera::examples

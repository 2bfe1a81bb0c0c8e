// The task `data.type: labelled_text`, `model.type: bert`: classifies texts.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "examples/text_classification/encoded_texts.h"
#include "examples/text_classification/labelled_texts.h"
#include "examples/text_classification/model.h"
#include "examples/text_classification/tokenizer.h"
#include "train/task/registry.h"
#include "train/task/sampler.h"
#include "train/task/task.h"

namespace tessera::examples {

/// File name of the vocabulary in the run's folder.
inline constexpr const char* kVocabularyName = "vocab.txt";

struct TextClassificationOptions {
  std::string path;                                  ///< data.path: see read_labelled_texts
  std::vector<std::string> labels = {"neg", "pos"};  ///< data.labels
  std::string tokenizer = "character";               ///< data.tokenizer: "character" or "wordpiece"
  std::string vocab;       ///< data.vocab: a vocab.txt; empty (characters only): made from the training part
  bool lower_case = true;  ///< data.lower_case: also removes accents
  int64_t min_frequency = 1;  ///< data.min_frequency: of the characters of a vocabulary that is made
  int64_t max_length = 128;   ///< data.max_length: tokens of a text, [CLS] and [SEP] included; the rest is
                              ///< left out. As read: at most the model's positions
  bool deduplicate = true;    ///< data.deduplicate: see without_duplicates
  train::PartsOptions parts;  ///< data.validation_fraction, data.test_fraction, data.split_seed
  BertOptions model;          ///< vocab_size 0: that of the vocabulary
};

/// Reads the options from the sections `model` and `data`. Throws ConfigError.
TextClassificationOptions read_text_classification_options(const config::Section& model,
                                                           const config::Section& data);

/// The tokenizer that the options name.
std::unique_ptr<Tokenizer> make_tokenizer(const TextClassificationOptions& options, Vocabulary vocabulary);
/// Sets the model's options that depend on the vocabulary. Throws ConfigError if model.vocab_size is
/// too small.
void fit_to_vocabulary(BertOptions& bert, const Vocabulary& vocabulary);

/// Accepts weights of a BERT without this classifier, without a pooler, or with heads for its
/// pretraining tasks.
LoadWeightsOptions bert_init_weights();

/// Owns the texts' tokens (not the texts), the model and its engine.
class TextClassification final : public train::Task {
 public:
  /// Reads, splits and tokenizes the texts. Throws DataError;
  /// ConfigError when model.vocab_size is too small.
  explicit TextClassification(const TextClassificationOptions& options);

  std::string_view name() const override { return "text_classification"; }
  int64_t train_size() const override { return static_cast<int64_t>(parts_.train.size()); }
  int64_t eval_size() const override { return static_cast<int64_t>(parts_.validation.size()); }
  std::string_view eval_set_name() const override { return "validation"; }
  int64_t test_size() const override { return static_cast<int64_t>(parts_.test.size()); }
  Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                     const InitOptions& options) override;
  train::Batch train_batch(const std::vector<int64_t>& indices, at::Generator) const override {
    return make_batch(parts_.train, indices);
  }
  train::Batch eval_batch(const std::vector<int64_t>& indices) const override {
    return make_batch(parts_.validation, indices);
  }
  train::Batch test_batch(const std::vector<int64_t>& indices) const override {
    return make_batch(parts_.test, indices);
  }
  at::Tensor loss(const train::Batch& batch) override;
  at::Tensor statistics(const train::Batch& batch) override;
  std::vector<std::string> metric_names() const override { return {"accuracy", "f1", "loss"}; }
  train::Metrics metrics(const at::Tensor& total) const override;
  std::string report(const at::Tensor& total) const override;
  std::vector<std::pair<std::string, std::string>> files() const override;
  LoadWeightsOptions init_weights() const override { return bert_init_weights(); }

  const Tokenizer& tokenizer() const { return *tokenizer_; }
  TypedEngine<BertForSequenceClassificationImpl>& engine() { return *engine_; }

 private:
  Vocabulary vocabulary_for(const LabelledTexts& data) const;
  train::Batch make_batch(const std::vector<int64_t>& part, const std::vector<int64_t>& indices) const;

  TextClassificationOptions options_;
  train::Parts parts_;
  std::unique_ptr<Tokenizer> tokenizer_;
  EncodedTexts texts_;
  std::vector<int64_t> labels_;  // of texts_
  std::unique_ptr<TypedEngine<BertForSequenceClassificationImpl>> engine_;
};

/// Adds the task and its predictor to `registry`.
void register_text_classification(train::Registry& registry);

}  // namespace tessera::examples

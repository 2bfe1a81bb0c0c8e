#include "examples/text_classification/task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/str.h"
#include "examples/text_classification/predictor.h"
#include "train/report/classification.h"
#include "train/report/classification_report.h"

namespace tessera::examples {
namespace {

void read_data(const config::Section& data, TextClassificationOptions& options) {
  data.required_text("type");
  options.path = data.required_text("path");
  options.labels = data.texts("labels", options.labels);
  options.tokenizer = data.choice("tokenizer", options.tokenizer, {"character", "wordpiece"});
  options.vocab = data.text("vocab", options.vocab);
  options.lower_case = data.boolean("lower_case", options.lower_case);
  options.min_frequency = data.integer("min_frequency", options.min_frequency, 1, 1'000'000'000);
  options.max_length = data.integer(
      "max_length", std::min(options.max_length, options.model.max_position_embeddings), 2, 1'000'000);
  options.deduplicate = data.boolean("deduplicate", options.deduplicate);
  options.parts.validation_fraction =
      data.number("validation_fraction", options.parts.validation_fraction, 0.0, 0.9);
  options.parts.test_fraction = data.number("test_fraction", options.parts.test_fraction, 0.0, 0.9);
  options.parts.seed = static_cast<uint64_t>(
      data.integer("split_seed", static_cast<int64_t>(options.parts.seed), 0, 9'000'000'000'000'000));
  data.finish();

  if (options.labels.size() < 2 ||
      std::set<std::string>(options.labels.begin(), options.labels.end()).size() < options.labels.size())
    data.fail("labels", "found " + join(options.labels, ", ") + "; expected at least two labels, each once");
  if (options.tokenizer == "wordpiece" && options.vocab.empty())
    data.fail("vocab",
              "not found, and data.tokenizer is \"wordpiece\"; expected the file vocab.txt of a BERT model");
  if (options.parts.validation_fraction + options.parts.test_fraction > 0.9)
    data.fail("test_fraction", str("found ", options.parts.test_fraction, " beside data.validation_fraction ",
                                   options.parts.validation_fraction, "; expected at most 0.9 together"));
}

void read_model(const config::Section& model, BertOptions& bert) {
  model.required_text("type");
  bert.vocab_size = model.integer("vocab_size", 0, 0, 100'000'000);
  bert.hidden_size = model.integer("hidden_size", bert.hidden_size, 1, 65536);
  bert.num_hidden_layers = model.integer("num_hidden_layers", bert.num_hidden_layers, 1, 1024);
  bert.num_attention_heads = model.integer("num_attention_heads", bert.num_attention_heads, 1, 1024);
  bert.intermediate_size = model.integer("intermediate_size", 4 * bert.hidden_size, 1, 1'000'000);
  bert.max_position_embeddings =
      model.integer("max_position_embeddings", bert.max_position_embeddings, 2, 1'000'000);
  bert.type_vocab_size = model.integer("type_vocab_size", bert.type_vocab_size, 1, 1024);
  bert.hidden_dropout_prob = model.number("hidden_dropout_prob", bert.hidden_dropout_prob, 0.0, 1.0);
  bert.attention_probs_dropout_prob =
      model.number("attention_probs_dropout_prob", bert.attention_probs_dropout_prob, 0.0, 1.0);
  bert.classifier_dropout = model.number("classifier_dropout", bert.hidden_dropout_prob, 0.0, 1.0);
  bert.layer_norm_eps = model.number("layer_norm_eps", bert.layer_norm_eps, 0.0, 1.0);
  bert.initializer_range = model.number("initializer_range", bert.initializer_range, 0.0, 10.0);
  model.finish();
  if (bert.hidden_size % bert.num_attention_heads != 0)
    model.fail("num_attention_heads",
               str("found ", bert.num_attention_heads, ", which does not divide model.hidden_size, ",
                   bert.hidden_size, "; expected a number that does"));
}

}  // namespace

TextClassificationOptions read_text_classification_options(const config::Section& model,
                                                           const config::Section& data) {
  TextClassificationOptions options;
  read_model(model, options.model);
  read_data(data, options);
  options.model.num_labels = static_cast<int64_t>(options.labels.size());
  if (options.max_length > options.model.max_position_embeddings)
    data.fail("max_length", str("found ", options.max_length, " tokens, but the model has positions for ",
                                options.model.max_position_embeddings,
                                " (model.max_position_embeddings); expected at most as many"));
  return options;
}

LoadWeightsOptions bert_init_weights() {
  return {.base_model_prefix = "bert.",
          .ignore_missing = {"classifier.*", "bert.pooler.*"},
          .ignore_unexpected = {"cls.*", "*embeddings.position_ids"}};
}

TextClassification::TextClassification(const TextClassificationOptions& options) : options_(options) {
  LabelledTexts data = read_labelled_texts(options.path, options.labels);
  if (options.deduplicate) data = without_duplicates(data);
  parts_ = train::split_into_parts(data.size(), options.parts);
  tokenizer_ = make_tokenizer(options_, vocabulary_for(data));
  fit_to_vocabulary(options_.model, tokenizer_->vocabulary());
  for (const std::string& text : data.texts) texts_.add(tokenizer_->encode(text, options.max_length));
  labels_ = std::move(data.labels);
}

std::unique_ptr<Tokenizer> make_tokenizer(const TextClassificationOptions& options, Vocabulary vocabulary) {
  if (options.tokenizer == "wordpiece")
    return std::make_unique<WordPieceTokenizer>(std::move(vocabulary), options.lower_case);
  return std::make_unique<CharacterTokenizer>(std::move(vocabulary), options.lower_case);
}

Vocabulary TextClassification::vocabulary_for(const LabelledTexts& data) const {
  if (!options_.vocab.empty()) return Vocabulary::read(options_.vocab);
  std::vector<std::string_view> texts;
  for (const int64_t index : parts_.train) texts.emplace_back(data.texts[static_cast<size_t>(index)]);
  return character_vocabulary(texts, options_.lower_case, options_.min_frequency);
}

void fit_to_vocabulary(BertOptions& bert, const Vocabulary& vocabulary) {
  if (bert.vocab_size == 0) bert.vocab_size = vocabulary.size();
  if (bert.vocab_size < vocabulary.size())
    throw ConfigError("model.vocab_size: found ", bert.vocab_size, ", but the vocabulary has ",
                      vocabulary.size(), " tokens; expected at least as many, or no such key");
  bert.pad_token_id = vocabulary.pad();
}

Engine& TextClassification::initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                                       const InitOptions& options) {
  engine_ = tessera::initialize([this] { return BertForSequenceClassification(options_.model); }, config,
                                std::move(comm), options);
  return *engine_;
}

train::Batch TextClassification::make_batch(const std::vector<int64_t>& part,
                                            const std::vector<int64_t>& indices) const {
  std::vector<int64_t> texts, labels;
  for (const int64_t index : indices) {
    texts.push_back(part[static_cast<size_t>(index)]);
    labels.push_back(labels_[static_cast<size_t>(texts.back())]);
  }
  const PaddedTexts rows = texts_.batch(texts, tokenizer_->vocabulary().pad(), options_.max_length);
  train::Batch batch;
  batch.inputs = {rows.input_ids, rows.attention_mask};  // (B, T), (B, T)
  batch.target = at::tensor(labels, at::kLong);          // (B)
  return batch;
}

at::Tensor TextClassification::loss(const train::Batch& batch) {
  const at::Tensor logits = engine_->forward(batch.inputs[0], batch.inputs[1]);  // (B, labels)
  return at::cross_entropy_loss(logits.to(at::kFloat), batch.target);
}

at::Tensor TextClassification::statistics(const train::Batch& batch) {
  return train::classification_statistics(engine_->forward(batch.inputs[0], batch.inputs[1]), batch.target,
                                          batch.mask);
}

train::Metrics TextClassification::metrics(const at::Tensor& total) const {
  train::Metrics metrics = train::classification_metrics(total);
  metrics.insert(metrics.begin() + 1,
                 {"f1", train::classification_report(train::confusion_matrix(total)).macro.f1});
  return metrics;
}

std::string TextClassification::report(const at::Tensor& total) const {
  return train::format_report(train::classification_report(train::confusion_matrix(total)), options_.labels);
}

std::vector<std::pair<std::string, std::string>> TextClassification::files() const {
  return {{kVocabularyName, tokenizer_->vocabulary().text()}};
}

void register_text_classification(train::Registry& registry) {
  registry.add(
      "labelled_text", "bert",
      [](const config::Section& model, const config::Section& data, const std::filesystem::path& run) {
        TextClassificationOptions options = read_text_classification_options(model, data);
        if (!run.empty())
          options.vocab = (run / kVocabularyName).string();  // the one the model was trained with
        return std::make_unique<TextClassification>(options);
      });
  registry.add_predictor(
      "labelled_text", "bert",
      [](const config::Section& model, const config::Section& data, const std::filesystem::path& run) {
        return std::make_unique<TextClassificationPredictor>(read_text_classification_options(model, data),
                                                             run / kVocabularyName);
      });
}

}  // namespace tessera::examples

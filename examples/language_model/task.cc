#include "examples/language_model/task.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "activations/chunked_loss.h"
#include "core/error.h"
#include "core/files/disk.h"
#include "examples/language_model/predictor.h"
#include "train/run/run_directory.h"

namespace tessera::examples {

LanguageModelOptions read_language_model_options(const config::Section& model, const config::Section& data) {
  LanguageModelOptions options;
  data.required_text("type");
  options.path = data.required_text("path");
  options.test_fraction = data.number("test_fraction", options.test_fraction, 0.0, 0.9);
  options.sample.prompt = data.text("prompt", options.sample.prompt);
  options.sample.num_bytes = data.integer("sample_bytes", options.sample.num_bytes, 0, 1'000'000);
  options.sample.temperature = data.number("temperature", options.sample.temperature, 0.0, 100.0);
  data.finish();
  if (options.sample.prompt.empty())
    data.fail("prompt", "found \"\"; expected at least one character to continue");
  GptOptions& gpt = options.model;
  model.required_text("type");
  gpt.dim = model.integer("dim", gpt.dim, 1, 65536);
  gpt.layers = model.integer("layers", gpt.layers, 1, 1024);
  gpt.heads = model.integer("heads", gpt.heads, 1, 1024);
  gpt.vocabulary = model.integer("vocabulary", gpt.vocabulary, 256, 1'000'000);
  gpt.sequence = model.integer("sequence", gpt.sequence, 1, 1'000'000);
  if (const int64_t rows = model.integer("loss_chunk_rows", 0, 0, 1'000'000'000); rows > 0)
    gpt.loss = [rows](const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target) {
      return chunked_cross_entropy(hidden, weight, {}, target, {.chunk_rows = rows});
    };
  model.finish();
  if (gpt.dim % gpt.heads != 0)
    throw ConfigError("model.heads: found ", gpt.heads, ", which does not divide model.dim, ", gpt.dim,
                      "; expected a number that does");
  options.sample.sequence = gpt.sequence;
  return options;
}

LanguageModel::LanguageModel(const LanguageModelOptions& options)
    : options_(options),
      text_(options.path, options.model.sequence),
      num_test_(static_cast<int64_t>(options.test_fraction * static_cast<double>(text_.num_windows()))) {}

Engine& LanguageModel::initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                                  const InitOptions& options) {
  engine_ = tessera::initialize([this] { return Gpt(options_.model); }, config, std::move(comm), options);
  return *engine_;
}

train::Batch LanguageModel::make_batch(const std::vector<int64_t>& windows) const {
  const at::Tensor rows = text_.windows(windows);
  train::Batch batch;
  batch.inputs = {rows.narrow(1, 0, options_.model.sequence)};  // (B, T)
  batch.target = rows.narrow(1, 1, options_.model.sequence);    // (B, T)
  return batch;
}

train::Batch LanguageModel::train_batch(const std::vector<int64_t>& indices, at::Generator) const {
  return make_batch(indices);
}

train::Batch LanguageModel::eval_batch(const std::vector<int64_t>& indices) const {
  std::vector<int64_t> windows;
  for (const int64_t index : indices) windows.push_back(train_size() + index);
  return make_batch(windows);
}

at::Tensor LanguageModel::loss(const train::Batch& batch) {
  return engine_->forward(batch.inputs[0], batch.target);
}

/// Returns {samples, sum over samples of the mean loss per token}.
at::Tensor LanguageModel::statistics(const train::Batch& batch) {
  const at::Tensor logits = engine_->forward(batch.inputs[0]).to(at::kFloat);  // (B, T, vocabulary)
  const at::Tensor token_loss =
      at::cross_entropy_loss(logits.flatten(0, 1), batch.target.flatten(), {}, at::Reduction::None);
  const at::Tensor counted = batch.mask.to(at::kDouble);  // (B)
  return at::stack(
      {counted.sum(), (token_loss.view(batch.target.sizes()).to(at::kDouble).mean(1) * counted).sum()});
}

train::Metrics LanguageModel::metrics(const at::Tensor& total) const {
  const double loss = total[1].item<double>() / total[0].item<double>();
  return {{"loss", loss}, {"perplexity", std::exp(loss)}};
}

std::vector<train::SampleFile> LanguageModel::write_samples(const std::filesystem::path& folder,
                                                            int64_t step) {
  if (options_.sample.num_bytes == 0) return {};
  const std::string drawn =
      sample_text([this](const at::Tensor& bytes) { return engine_->forward(bytes); }, options_.sample);
  if (engine_->rank() != 0) return {};
  const std::filesystem::path path = train::sample_path(folder, step, ".txt");
  try {
    replace_file(path, options_.sample.prompt + drawn);  // atomically, in case the run is killed
  } catch (const DiskError& error) {
    throw DataError(error.what());
  }
  return {{"text", path}};
}

void register_language_model(train::Registry& registry) {
  registry.add("text", "gpt",
               [](const config::Section& model, const config::Section& data, const std::filesystem::path&) {
                 return std::make_unique<LanguageModel>(read_language_model_options(model, data));
               });
  registry.add_predictor(
      "text", "gpt",
      [](const config::Section& model, const config::Section& data, const std::filesystem::path&) {
        return std::make_unique<LanguageModelPredictor>(read_language_model_options(model, data));
      });
}

}  // namespace tessera::examples

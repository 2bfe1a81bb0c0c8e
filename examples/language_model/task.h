// The task `data.type: text`, `model.type: gpt`: the next byte of a text file.
#pragma once

#include <memory>
#include <string>

#include "examples/language_model/model.h"
#include "examples/language_model/sample.h"
#include "examples/language_model/text.h"
#include "train/task/registry.h"
#include "train/task/task.h"

namespace tessera::examples {

struct LanguageModelOptions {
  std::string path;            ///< data.path: a text file
  double test_fraction = 0.1;  ///< data.test_fraction: taken from the end of the file
  SampleOptions sample;  ///< data.prompt, data.sample_bytes (0: none), data.temperature: the text drawn at
                         ///< each evaluation
  GptOptions model;
};

/// Reads the options from the sections `model` and `data`. Throws ConfigError.
LanguageModelOptions read_language_model_options(const config::Section& model, const config::Section& data);

class LanguageModel final : public train::Task {
 public:
  /// Reads the text. Throws DataError.
  explicit LanguageModel(const LanguageModelOptions& options);

  std::string_view name() const override { return "language_model"; }
  int64_t train_size() const override { return text_.num_windows() - eval_size(); }
  int64_t eval_size() const override { return num_test_; }
  Engine& initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                     const InitOptions& options) override;
  train::Batch train_batch(const std::vector<int64_t>& indices, at::Generator) const override;
  train::Batch eval_batch(const std::vector<int64_t>& indices) const override;
  at::Tensor loss(const train::Batch& batch) override;
  at::Tensor statistics(const train::Batch& batch) override;
  std::vector<std::string> metric_names() const override { return {"loss", "perplexity"}; }
  train::Metrics metrics(const at::Tensor& total) const override;
  /// step_00000100.txt: the prompt and the text sampled after it.
  std::vector<train::SampleFile> write_samples(const std::filesystem::path& folder, int64_t step) override;

 private:
  train::Batch make_batch(const std::vector<int64_t>& windows) const;

  LanguageModelOptions options_;
  ByteText text_;
  int64_t num_test_;
  std::unique_ptr<TypedEngine<GptImpl>> engine_;
};

/// Adds the task and its predictor to `registry`.
void register_language_model(train::Registry& registry);

}  // namespace tessera::examples

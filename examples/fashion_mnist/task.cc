#include "examples/fashion_mnist/task.h"

#include <ATen/ATen.h>

#include <utility>

#include "core/str.h"
#include "train/report/classification.h"
#include "train/report/classification_report.h"

namespace tessera::examples {

FashionMnistOptions read_options(const config::Section& model, const config::Section& data) {
  FashionMnistOptions options;
  data.required_text("type");
  options.path = data.text("path", options.path);
  options.flip = data.boolean("flip", options.flip);
  options.labels = data.texts("labels", options.labels);
  if (!options.labels.empty() && static_cast<int64_t>(options.labels.size()) != kNumClasses)
    data.fail("labels", str("found ", options.labels.size(), " names; expected ", kNumClasses,
                            ", one a class, or none"));
  data.finish();
  model.required_text("type");
  options.model.channels = model.integer("channels", options.model.channels, 1, 4096);
  options.model.hidden = model.integer("hidden", options.model.hidden, 1, 65536);
  options.model.dropout = model.number("dropout", options.model.dropout, 0.0, 1.0);
  model.finish();
  return options;
}

FashionMnist::FashionMnist(const FashionMnistOptions& options)
    : options_(options),
      train_(load_split(options.path, Split::kTrain)),
      test_(load_split(options.path, Split::kTest)),
      pixels_(pixel_statistics(train_)) {}

Engine& FashionMnist::initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                                 const InitOptions& options) {
  engine_ =
      tessera::initialize([this] { return FashionCnn(options_.model); }, config, std::move(comm), options);
  return *engine_;
}

train::Batch FashionMnist::make_batch(const LabelledImages& data, const std::vector<int64_t>& indices) const {
  const at::Tensor rows = at::tensor(indices, at::kLong);
  const at::Tensor images = data.images.index_select(0, rows).to(at::kFloat);
  train::Batch batch;
  batch.inputs = {images.div_(255).sub_(pixels_.mean).div_(pixels_.std)};  // (B, 1, 28, 28)
  batch.target = data.labels.index_select(0, rows).to(at::kLong);          // (B)
  return batch;
}

train::Batch FashionMnist::train_batch(const std::vector<int64_t>& indices, at::Generator generator) const {
  train::Batch batch = make_batch(train_, indices);
  if (options_.flip) {
    at::Tensor& images = batch.inputs[0];
    const at::Tensor mirrored = at::rand({images.size(0), 1, 1, 1}, std::move(generator)) < 0.5;
    images = at::where(mirrored, images.flip(3), images);
  }
  return batch;
}

train::Batch FashionMnist::eval_batch(const std::vector<int64_t>& indices) const {
  return make_batch(test_, indices);
}

at::Tensor FashionMnist::loss(const train::Batch& batch) {
  const at::Tensor logits = engine_->forward(batch.inputs[0]);  // (B, 10)
  return at::cross_entropy_loss(logits.to(at::kFloat), batch.target);
}

at::Tensor FashionMnist::statistics(const train::Batch& batch) {
  return train::classification_statistics(engine_->forward(batch.inputs[0]), batch.target, batch.mask);
}

train::Metrics FashionMnist::metrics(const at::Tensor& total) const {
  return train::classification_metrics(total);
}

std::string FashionMnist::report(const at::Tensor& total) const {
  return train::format_report(train::classification_report(train::confusion_matrix(total)), options_.labels);
}

void register_fashion_mnist(train::Registry& registry) {
  registry.add("fashion_mnist", "fashion_mnist_cnn",
               [](const config::Section& model, const config::Section& data, const std::filesystem::path&) {
                 return std::make_unique<FashionMnist>(read_options(model, data));
               });
}

}  // namespace tessera::examples

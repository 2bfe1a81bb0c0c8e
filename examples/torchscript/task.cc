#include "examples/torchscript/task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <utility>

#include "core/error.h"
#include "core/str.h"
#include "engine/checkpoint/checkpoint_types.h"
#include "examples/torchscript/data/data_files.h"
#include "examples/torchscript/predictor.h"
#include "examples/torchscript/script_model.h"
#include "train/data/data_loader.h"
#include "train/task/sampler.h"

namespace tessera::examples {
namespace {

/// The first elements of a batch's statistics: samples, sum of the losses, sum of their weights.
constexpr int64_t kNumSums = 3;

std::unique_ptr<TensorSet> open_test_set(const TensorsOptions& options) {
  if (options.eval_files.empty()) return nullptr;
  return std::make_unique<TensorSet>(find_data_files(options.eval_files), options.inputs, options.target);
}

/// A loss function's targets are classified by their types; those of the model's own loss cannot be.
void check_target(const TensorSet& set, Loss loss) {
  if (!counts_classes(loss)) return;
  if (!at::isIntegralType(to_torch(set.target_type()), /*includeBool=*/false))
    throw DataError(set.target_name(), " is of type ", name_of(set.target_type()),
                    "; expected class numbers, of an integer type, for model.loss ", name_of(loss));
  if (loss == Loss::kCausalLm && (set.target_shape().size() != 1 || set.target_shape()[0] < 2))
    throw DataError(set.target_name(), " has samples of shape ", describe_shape(set.target_shape()),
                    "; expected [T], at least two tokens, for model.loss causal_lm");
}

/// The origin of a batch, for messages. A failed device cannot return the record numbers.
std::string origin_of(const train::Batch& batch, const TensorSet& set) {
  std::vector<int64_t> records;
  try {
    const at::Tensor numbers = batch.inputs.back().cpu();
    records.assign(numbers.const_data_ptr<int64_t>(), numbers.const_data_ptr<int64_t>() + numbers.numel());
  } catch (const c10::Error&) {
  }
  return set.describe_records(records);
}

/// Returns the tensor as PyTorch's losses expect it: class numbers are int64.
at::Tensor for_losses(const at::Tensor& tensor) {
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) ? tensor.to(at::kLong)
                                                                         : for_layers(tensor);
}

}  // namespace

at::Tensor for_layers(const at::Tensor& tensor) {
  return tensor.is_floating_point() ? tensor.to(at::kFloat) : tensor;
}

TensorsTask::TensorsTask(const TensorsOptions& options)
    : options_(options),
      train_(find_data_files(options.files), options.inputs, options.target),
      test_(open_test_set(options)),
      train_size_(train_.size() -
                  static_cast<int64_t>(options.eval_fraction * static_cast<double>(train_.size()))),
      split_(split()),
      loss_(options.loss),
      metrics_(options.loss.kind, options.metrics),
      model_(options.model_path, options.eval_model_path) {
  model_.check_arguments(
      {.inputs = options_.inputs, .target = options_.loss.kind == Loss::kModel ? options_.target : ""});
  check_target(train_, options_.loss.kind);
  if (test_) {
    check_target(*test_, options_.loss.kind);
    test_->check_like(train_);
  }
  if (counts_classes(options_.loss.kind)) weights_ = weigh();
}

/// Both parts in the order of the file, which is faster to read and is the training order without shuffling.
TensorsTask::Split TensorsTask::split() const {
  if (!options_.random_split || train_size_ == train_.size()) return {};
  train::Parts parts = train::split_into_parts(
      train_.size(),
      {.validation_fraction = options_.eval_fraction, .test_fraction = 0, .seed = options_.split_seed});
  std::sort(parts.train.begin(), parts.train.end());
  std::sort(parts.validation.begin(), parts.validation.end());
  return {std::move(parts.train), std::move(parts.validation)};
}

/// The weight of each training sample in its batch's mean, if they differ: see loss.h.
std::shared_ptr<const std::vector<float>> TensorsTask::weigh() const {
  auto weights = std::make_shared<std::vector<float>>();
  weights->reserve(static_cast<size_t>(train_size_));
  train_.visit_targets(
      train_size_, [this](int64_t index) { return train_row(index); },
      [&](int64_t, const at::Tensor& targets) {
        const at::Tensor some = loss_.target_weights(targets).to(at::kFloat).contiguous();
        weights->insert(weights->end(), some.const_data_ptr<float>(),
                        some.const_data_ptr<float>() + some.numel());
      });
  if (std::adjacent_find(weights->begin(), weights->end(), std::not_equal_to<>()) == weights->end())
    return nullptr;
  return weights;
}

Engine& TensorsTask::initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                                const InitOptions& options) {
  Engine& engine = model_.initialize(config, std::move(comm), options);
  loss_.to(options.device);
  if (metrics_.wants("r2")) metrics_.set_center(eval_set().target({0})[0].to(options.device));
  try_out(std::min(config.train_micro_batch_size_per_gpu, train_size()));
  return engine;
}

/// A trace made in training mode changes running statistics in evaluation too. Such changes are undone.
void TensorsTask::try_out(int64_t batch_size) {
  const at::NoGradGuard no_grad;
  Engine& engine = model_.engine();
  std::map<std::string, at::Tensor> before;
  for (const auto& [name, tensor] : engine.sharded_model().buffers()) before[name] = tensor.clone();
  std::vector<int64_t> rows;
  for (int64_t index = 0; index < batch_size; ++index) rows.push_back(train_row(index));
  engine.eval();
  const train::Batch batch = train::to_device(make_batch(train_, rows), engine.device());
  const at::Tensor output = forward(batch, train_, ForwardMode::kTraining);
  if (model_.has_evaluation()) forward(batch, train_, ForwardMode::kEvaluation);
  if (counts_classes(options_.loss.kind)) {
    train_.check_labels(loss_.num_classes(output), kIgnoredLabel);
    if (test_) test_->check_labels(loss_.num_classes(output), kIgnoredLabel);
  }
  engine.train();
  // The buffers are found by name, since forward may have assigned them anew.
  for (const auto& [name, tensor] : engine.sharded_model().buffers())
    if (const auto found = before.find(name); found != before.end())
      zero::write_buffer(tensor, found->second, /*keep_dtype=*/false);
}

/// The arguments of forward, followed by the record numbers, (B) int64, for messages.
train::Batch TensorsTask::make_batch(const TensorSet& set, const std::vector<int64_t>& rows) const {
  train::Batch batch;
  for (const at::Tensor& input : set.inputs(rows)) batch.inputs.push_back(for_layers(input));
  batch.inputs.push_back(at::tensor(rows, at::kLong));
  if (const at::Tensor target = set.target(rows); target.defined()) batch.target = for_losses(target);
  return batch;
}

train::Batch TensorsTask::train_batch(const std::vector<int64_t>& indices, at::Generator) const {
  std::vector<int64_t> rows = indices;
  for (int64_t& row : rows) row = train_row(row);
  return make_batch(train_, rows);
}

train::Batch TensorsTask::eval_batch(const std::vector<int64_t>& indices) const {
  std::vector<int64_t> rows = indices;
  if (!test_)
    for (int64_t& row : rows)
      row = split_.test.empty() ? train_size_ + row : split_.test[static_cast<size_t>(row)];
  return make_batch(eval_set(), rows);
}

/// The model's output: its loss, or the input of the loss function.
at::Tensor TensorsTask::forward(const train::Batch& batch, const TensorSet& set, ForwardMode mode) {
  std::vector<c10::IValue> arguments(batch.inputs.begin(), batch.inputs.end() - 1);
  if (own_loss() && batch.target.defined()) arguments.emplace_back(batch.target);
  at::Tensor output;
  try {
    output = tensor_of(model_.forward(std::move(arguments), mode), own_loss() ? "loss" : "logits",
                       model_.path(mode));
  } catch (...) {
    rethrow_of_model(model_.path(mode), [&] { return origin_of(batch, set); });
  }
  check_output(output, batch, set, mode);
  return output;
}

/// Checks shapes only, so it does not synchronize with the device. A loss function would silently broadcast
/// (B, 1) and (B) to (B, B).
void TensorsTask::check_output(const at::Tensor& output, const train::Batch& batch, const TensorSet& set,
                               ForwardMode mode) const {
  if (own_loss()) {
    if (output.numel() == 1) return;
    throw DataError(model_.path(mode), ": forward gives a loss of shape ", describe_shape(output.sizes()),
                    "; expected one number, or a model.loss to be computed of it");
  }
  if (const std::string wrong = loss_.mismatch(output, batch.target); !wrong.empty())
    throw DataError(model_.path(mode), ": ", wrong, " (", set.target_name(), ")");
}

at::Tensor TensorsTask::loss(const train::Batch& batch) {
  const at::Tensor output = forward(batch, train_, ForwardMode::kTraining);
  return own_loss() ? output : loss_.mean(output, batch.target);
}

/// Returns {samples, sum of the losses, sum of their weights, the metrics' sums …}.
at::Tensor TensorsTask::statistics(const train::Batch& batch) {
  if (own_loss()) return statistics_of_own_loss(batch);
  const at::Tensor output = forward(batch, eval_set(), ForwardMode::kEvaluation);
  const auto in_shape_of = [&](const at::Tensor& tensor) {  // the mask, of rows
    std::vector<int64_t> row(static_cast<size_t>(tensor.dim()), 1);
    row[0] = batch.mask.size(0);
    return batch.mask.view(row).expand_as(tensor);
  };
  const auto [losses, weights] = loss_.elements(output, batch.target);
  const at::Tensor counted = in_shape_of(losses);
  const auto sum = [&](const at::Tensor& values) {
    return at::where(counted, values.to(at::kDouble), 0.0).sum();
  };  // a product would not do: 0 * inf is NaN
  const at::Tensor sums = at::stack({batch.mask.sum().to(at::kDouble), sum(losses), sum(weights)});
  if (!counts_classes(options_.loss.kind))
    return at::cat({sums, metrics_.statistics(output, batch.target, batch.mask)});
  const auto [scores, labels] = loss_.positions(output, batch.target);
  return at::cat(
      {sums, metrics_.statistics(scores, labels,
                                 counted.reshape(labels.sizes()).logical_and(labels.ne(kIgnoredLabel)))});
}

/// The model's own loss cannot leave rows out, so it gets the batch without padding. It runs even if all rows
/// are padding.
at::Tensor TensorsTask::statistics_of_own_loss(const train::Batch& batch) {
  const at::Tensor valid = batch.mask.sum().to(at::kDouble);
  const int64_t num_valid = valid.item<int64_t>();
  train::Batch counted = batch;
  for (at::Tensor& input : counted.inputs) input = input.narrow(0, 0, std::max<int64_t>(num_valid, 1));
  if (counted.target.defined()) counted.target = counted.target.narrow(0, 0, std::max<int64_t>(num_valid, 1));
  const at::Tensor loss = forward(counted, eval_set(), ForwardMode::kEvaluation).to(at::kDouble).reshape({});
  return at::stack({valid, num_valid > 0 ? loss * valid : at::zeros_like(loss), valid});
}

std::vector<std::string> TensorsTask::metric_names() const {
  std::vector<std::string> names = metrics_.names();
  names.push_back("loss");
  return names;
}

train::Metrics TensorsTask::metrics(const at::Tensor& total) const {
  const double* sums = total.const_data_ptr<double>();
  const double loss = sums[1] / sums[2];
  train::Metrics metrics = metrics_.metrics(total.narrow(0, kNumSums, total.numel() - kNumSums), loss);
  metrics.emplace_back("loss", loss);
  return metrics;
}

std::string TensorsTask::report(const at::Tensor& total) const {
  return metrics_.report(total.narrow(0, kNumSums, total.numel() - kNumSums));
}

void register_torchscript(train::Registry& registry) {
  registry.add("tensors", "torchscript",
               [](const config::Section& model, const config::Section& data, const std::filesystem::path&) {
                 return std::make_unique<TensorsTask>(read_tensors_options(model, data));
               });
  registry.add_predictor(
      "tensors", "torchscript",
      [](const config::Section& model, const config::Section& data, const std::filesystem::path&) {
        return std::make_unique<TensorsPredictor>(read_tensors_options(model, data));
      });
}

}  // namespace tessera::examples

#include "examples/torchscript/task.h"

#include <ATen/ATen.h>
#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "core/str.h"
#include "engine/checkpoint_types.h"
#include "examples/torchscript/script_model.h"
#include "train/data_loader.h"

namespace tessera::examples {
namespace {

std::unique_ptr<TensorSet> open_test_set(const TensorsOptions& options) {
  if (options.eval_path.empty()) return nullptr;
  return std::make_unique<TensorSet>(options.eval_path, options.inputs, options.target);
}

/// A loss function's targets can be told from their types; the model's own can not.
void check_target_type(const TensorSet& set, Loss loss) {
  if (!counts_classes(loss) || at::isIntegralType(to_torch(set.target_type()), /*includeBool=*/false)) return;
  throw DataError(str(set.target_name(), " is of type ", checkpoint::name_of(set.target_type()),
                      "; expected class numbers, of an integer type, for model.loss ", name_of(loss)));
}

/// Where a batch comes from, for messages. A device that has failed does not tell its records any more.
std::string origin_of(const train::Batch& batch, const TensorSet& set) {
  std::vector<int64_t> records;
  try {
    const at::Tensor numbers = batch.inputs.back().cpu();
    records.assign(numbers.const_data_ptr<int64_t>(), numbers.const_data_ptr<int64_t>() + numbers.numel());
  } catch (const c10::Error&) {
  }
  return set.describe_records(records);
}

/// In the type layers expect: floating ones in fp32 (the engine makes them bf16 or fp16 where it computes in that).
at::Tensor for_layers(const at::Tensor& tensor) { return tensor.is_floating_point() ? tensor.to(at::kFloat) : tensor; }

/// As PyTorch's losses expect it: class numbers are int64.
at::Tensor for_losses(const at::Tensor& tensor) {
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) ? tensor.to(at::kLong) : for_layers(tensor);
}

}  // namespace

TensorsOptions read_tensors_options(const config::Section& model, const config::Section& data) {
  TensorsOptions options;
  model.required_text("type");
  options.model_path = model.required_text("path");
  options.loss = loss_of(model.word("loss", "model", loss_names()));
  model.finish();
  data.required_text("type");
  options.path = data.required_text("path");
  options.eval_path = data.text("eval_path", options.eval_path);
  options.eval_fraction = data.number("eval_fraction", options.eval_fraction, 0.0, 0.9);
  options.inputs = data.texts("inputs", {});
  options.target = data.text("target", options.target);
  data.finish();
  if (options.inputs.empty()) data.fail("inputs", "is missing; expected the names of the tensors that forward takes, such as [\"x\"]");
  if (options.target.empty() && options.loss != Loss::kModel)
    data.fail("target", str("is missing; expected the name of a tensor, which model.loss ", name_of(options.loss), " needs"));
  if (!options.eval_path.empty() && options.eval_fraction > 0)
    data.fail("eval_fraction", str("found ", options.eval_fraction, " beside data.eval_path; expected one of the two"));
  return options;
}

TensorsTask::TensorsTask(const TensorsOptions& options)
    : options_(options),
      train_(options.path, options.inputs, options.target),
      test_(open_test_set(options)),
      num_train_(train_.size() - static_cast<int64_t>(options.eval_fraction * static_cast<double>(train_.size()))),
      model_(load_script_model(options.model_path)) {
  check_target_type(train_, options_.loss);
  if (!test_) return;
  check_target_type(*test_, options_.loss);
  test_->check_like(train_);
}

Engine& TensorsTask::initialize(const EngineConfig& config, comm::CommunicatorPtr comm, const InitOptions& options) {
  engine_ = tessera::initialize(model_, config, std::move(comm), options);
  try_out(std::min(config.train_micro_batch_size_per_gpu, train_size()));
  return *engine_;
}

/// A trace of a model in training mode changes running statistics in evaluation too; what this pass changes is taken back.
void TensorsTask::try_out(int64_t batch_size) {
  const at::NoGradGuard no_grad;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers;
  for (const zero::NamedTensor& buffer : engine_->sharded_model().buffers()) buffers.emplace_back(buffer.tensor, buffer.tensor.clone());
  std::vector<int64_t> rows(static_cast<size_t>(batch_size));
  std::iota(rows.begin(), rows.end(), 0);
  engine_->eval();
  const train::Batch batch = train::to_device(make_batch(train_, rows), engine_->device());
  const at::Tensor output = forward(batch, train_);
  if (counts_classes(options_.loss)) {
    train_.check_labels(output.size(1), kIgnoredLabel);
    if (test_) test_->check_labels(output.size(1), kIgnoredLabel);
  }
  engine_->train();
  for (const auto& [buffer, before] : buffers) buffer.copy_(before);
}

/// What forward takes, and behind it the records' numbers, (B) int64, for messages.
train::Batch TensorsTask::make_batch(const TensorSet& set, const std::vector<int64_t>& rows) const {
  train::Batch batch;
  for (const at::Tensor& input : set.inputs(rows)) batch.inputs.push_back(for_layers(input));
  batch.inputs.push_back(at::tensor(rows, at::kLong));
  if (const at::Tensor target = set.target(rows); target.defined()) batch.target = for_losses(target);
  return batch;
}

train::Batch TensorsTask::train_batch(const std::vector<int64_t>& indices, at::Generator) const { return make_batch(train_, indices); }

train::Batch TensorsTask::eval_batch(const std::vector<int64_t>& indices) const {
  std::vector<int64_t> rows = indices;
  if (!test_)
    for (int64_t& row : rows) row += num_train_;
  return make_batch(eval_set(), rows);
}

/// What the model gives: its loss, or what a loss is computed of.
at::Tensor TensorsTask::forward(const train::Batch& batch, const TensorSet& set) {
  const bool own_loss = options_.loss == Loss::kModel;
  std::vector<c10::IValue> arguments(batch.inputs.begin(), batch.inputs.end() - 1);
  if (own_loss && batch.target.defined()) arguments.emplace_back(batch.target);
  at::Tensor output;
  try {
    output = tensor_of(engine_->forward(arguments), own_loss ? "loss" : "logits", options_.model_path);
  } catch (...) {
    rethrow_of_model(options_.model_path, [&] { return origin_of(batch, set); });
  }
  check_output(output, batch, set);
  return output;
}

/// Looks at shapes alone, and so waits for no device. A loss function would broadcast (B, 1) and (B) to (B, B), and nobody would know.
void TensorsTask::check_output(const at::Tensor& output, const train::Batch& batch, const TensorSet& set) const {
  if (options_.loss == Loss::kModel) {
    if (output.numel() == 1) return;
    throw DataError(str(options_.model_path, ": forward gives a loss of shape ", describe_shape(output.sizes()),
                        "; expected one number, or a model.loss to be computed of it"));
  }
  if (const std::string wrong = mismatch(options_.loss, output, batch.target); !wrong.empty())
    throw DataError(str(options_.model_path, ": ", wrong, " (", set.target_name(), ")"));
}

at::Tensor TensorsTask::loss(const train::Batch& batch) {
  const at::Tensor output = forward(batch, train_);
  if (options_.loss == Loss::kModel) return output;
  return compute_loss(options_.loss, output, batch.target, at::Reduction::Mean);
}

// {samples, sum of the losses, losses, right ones}
at::Tensor TensorsTask::statistics(const train::Batch& batch) {
  const at::Tensor valid = batch.mask.sum().to(at::kDouble);
  if (options_.loss == Loss::kModel) {
    // A loss of the model's own cannot leave rows out, so it gets none of the padding; where all is padding, it still runs.
    const int64_t num_valid = valid.item<int64_t>();
    train::Batch counted = batch;
    for (at::Tensor& input : counted.inputs) input = input.narrow(0, 0, std::max<int64_t>(num_valid, 1));
    if (counted.target.defined()) counted.target = counted.target.narrow(0, 0, std::max<int64_t>(num_valid, 1));
    const at::Tensor loss = forward(counted, eval_set()).to(at::kDouble).reshape({});
    return at::stack({valid, num_valid > 0 ? loss * valid : at::zeros_like(loss), valid, at::zeros_like(loss)});
  }
  const at::Tensor output = forward(batch, eval_set());
  const at::Tensor losses = compute_loss(options_.loss, output, batch.target, at::Reduction::None);
  std::vector<int64_t> row(static_cast<size_t>(losses.dim()), 1);
  row[0] = losses.size(0);
  at::Tensor counted = batch.mask.view(row).expand_as(losses);
  at::Tensor correct = at::zeros({}, losses.options().dtype(at::kDouble));
  if (counts_classes(options_.loss)) {
    counted = counted.logical_and(batch.target.ne(kIgnoredLabel));
    correct = output.argmax(1).eq(batch.target).logical_and(counted).sum().to(at::kDouble);
  }
  const at::Tensor sum = at::where(counted, losses.to(at::kDouble), 0.0).sum();  // not a product: 0 * inf is not 0
  return at::stack({valid, sum, counted.sum().to(at::kDouble), correct});
}

std::vector<std::string> TensorsTask::metric_names() const {
  if (counts_classes(options_.loss)) return {"accuracy", "loss"};
  return {"loss"};
}

train::Metrics TensorsTask::metrics(const at::Tensor& total) const {
  const double* sums = total.const_data_ptr<double>();
  const double loss = sums[1] / sums[2];
  if (counts_classes(options_.loss)) return {{"accuracy", sums[3] / sums[2]}, {"loss", loss}};
  return {{"loss", loss}};
}

void register_torchscript(train::Registry& registry) {
  registry.add("tensors", "torchscript", [](const config::Section& model, const config::Section& data, const std::filesystem::path&) {
    return std::make_unique<TensorsTask>(read_tensors_options(model, data));
  });
}

}  // namespace tessera::examples

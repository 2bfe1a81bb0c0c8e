#include "examples/torchscript/predictor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "core/str.h"
#include "core/utf8.h"
#include "examples/torchscript/data/data_files.h"
#include "examples/torchscript/data/dataset.h"
#include "examples/torchscript/data/tensor_output.h"
#include "examples/torchscript/script_model.h"
#include "examples/torchscript/task.h"

namespace tessera::examples {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

TensorsPredictor::TensorsPredictor(const TensorsOptions& options)
    : options_(options), model_(options.model_path, options.eval_model_path) {}

Engine& TensorsPredictor::initialize(const EngineConfig& config, comm::CommunicatorPtr comm,
                                     const InitOptions& options) {
  return model_.initialize(config, std::move(comm), options);
}

namespace {

/// The tensors with a row for each sample, on the CPU.
NamedTensors rows_of(const c10::IValue& given, int64_t num_samples, const std::string& path) {
  NamedTensors rows;
  std::vector<std::string> others;
  for (const auto& [name, tensor] : tensors_of(given)) {
    others.push_back(str(quoted_name(name), " ", describe_shape(tensor.sizes())));
    if (tensor.dim() == 0 || tensor.size(0) != num_samples) continue;
    rows.emplace_back(name, for_layers(tensor).cpu().contiguous());
  }
  if (rows.empty())
    throw DataError(path, ": forward gives ", others.empty() ? "no tensor" : join(others, ", "), " for ",
                    num_samples, " samples; expected a tensor with a row for each");
  return rows;
}

}  // namespace

std::vector<train::PredictedTensor> TensorsPredictor::predict_file(const train::PredictFileOptions& options) {
  const bool own_loss = options_.loss.kind == Loss::kModel;  // whose forward takes the target too
  const TensorSet set(find_data_files({options.input}), options_.inputs, own_loss ? options_.target : "");
  TensorOutput output(options.output, set.size());
  const std::string& path = model_.path(ForwardMode::kEvaluation);
  const at::NoGradGuard no_grad;
  for (int64_t begin = 0; begin < set.size(); begin += options.batch_size) {
    std::vector<int64_t> numbers(static_cast<size_t>(std::min(options.batch_size, set.size() - begin)));
    std::iota(numbers.begin(), numbers.end(), begin);
    std::vector<c10::IValue> arguments;
    for (const at::Tensor& input : set.inputs(numbers)) arguments.emplace_back(for_layers(input));
    if (const at::Tensor target = set.target(numbers); target.defined()) arguments.emplace_back(target);
    NamedTensors rows;
    try {
      rows = rows_of(model_.forward(std::move(arguments), ForwardMode::kEvaluation),
                     static_cast<int64_t>(numbers.size()), path);
    } catch (...) {
      rethrow_of_model(path, [&] { return set.describe_records(numbers); });
    }
    output.add(rows, path);
    if (options.progress) options.progress(begin + static_cast<int64_t>(numbers.size()), set.size());
  }
  return output.finish();
}

}  // namespace tessera::examples

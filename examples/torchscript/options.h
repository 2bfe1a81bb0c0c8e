// The sections `model` and `data` for a TorchScript model and tensor files. docs/own_model.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/config/section.h"
#include "examples/torchscript/loss.h"

namespace tessera::examples {

struct TensorsOptions {
  std::string model_path;       ///< model.path: what torch.jit.save wrote
  std::string eval_model_path;  ///< model.eval_path: the model traced in evaluation mode; empty: model_path
  LossOptions loss;             ///< model.loss and its options
  std::vector<std::string> metrics;     ///< model.metrics
  std::vector<std::string> files;       ///< data.path: .safetensors, .h5; names and patterns
  std::vector<std::string> eval_files;  ///< data.eval_path: the same for the test set; empty: eval_fraction
  double eval_fraction = 0;             ///< data.eval_fraction: of the samples of `files`
  bool random_split = false;            ///< data.split "random"; else the test set is the end
  uint64_t split_seed = 0;              ///< data.split_seed
  bool shuffle = true;                  ///< data.shuffle
  std::vector<std::string> inputs;      ///< data.inputs: tensors that forward takes, in this order
  std::string target;                   ///< data.target; empty: none, and the model needs none
};

/// Throws ConfigError.
TensorsOptions read_tensors_options(const config::Section& model, const config::Section& data);

}  // namespace tessera::examples

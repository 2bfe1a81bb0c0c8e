// Options of Engine::load_weights, for weights of a model that differs in some parts, such as a pretrained
// encoder with another head or none.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tessera {

struct LoadWeightsOptions {
  /// "bert.": the model's "bert.x" may be "x" in the file. Hugging Face's base_model_prefix.
  std::string base_model_prefix = {};
  /// Globs of the model's names: a tensor of these that the file lacks keeps its values, with a warning.
  std::vector<std::string> ignore_missing = {};
  /// Globs of the file's names: a tensor of these that the model lacks is ignored.
  std::vector<std::string> ignore_unexpected = {};
  /// Globs of the model's names: a tensor of these that has another shape in the file keeps its values, with
  /// a warning. Hugging Face's ignore_mismatched_sizes.
  std::vector<std::string> ignore_mismatched = {};
  /// {"module.", ""}: a name that begins with the first in the file begins with the second in the model. The
  /// first pair that fits is used; ignore_unexpected and base_model_prefix see the new names.
  std::vector<std::pair<std::string, std::string>> renamed_prefixes = {};
  /// The end of the error for names that do not match: how the caller's user gives these options.
  std::string advice = {};
};

}  // namespace tessera

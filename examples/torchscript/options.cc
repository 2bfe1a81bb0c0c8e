#include "examples/torchscript/options.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/str.h"
#include "engine/config/document/suggest.h"
#include "examples/torchscript/metrics.h"

namespace tessera::examples {
namespace {

constexpr double kLargest = 1e30;
constexpr int64_t kLargestSeed = 9'000'000'000'000'000;

/// A key that takes one file or a list of files. Empty if the key is absent.
std::vector<std::string> files_of(const config::Section& data, const std::string& name) {
  if (!data.has(name) || !data.json().at(name).is_array()) {
    const std::string file = data.text(name, "");
    return file.empty() ? std::vector<std::string>{} : std::vector<std::string>{file};
  }
  const std::vector<std::string> files = data.texts(name, {});
  if (files.empty()) data.fail(name, "found []; expected the name of a file, or a list of them");
  return files;
}

LossOptions read_loss(const config::Section& model) {
  LossOptions loss;
  loss.kind = loss_of(model.choice("loss", "model", loss_names()));
  loss.class_weights = model.numbers("class_weights", {}, 0.0, kLargest);
  loss.pos_weight = model.numbers("pos_weight", {}, 0.0, kLargest);
  loss.label_smoothing = model.number("label_smoothing", 0.0, 0.0, 1.0);
  return loss;
}

void check_loss(const config::Section& model, const LossOptions& loss) {
  const auto only_for = [&](const char* key, const char* losses) {
    model.fail(key,
               str("found beside model.loss ", name_of(loss.kind), "; expected it with ", losses, " only"));
  };
  if (!loss.class_weights.empty() && loss.kind != Loss::kCrossEntropy && loss.kind != Loss::kNll)
    only_for("class_weights", "cross_entropy or nll");
  if (!loss.pos_weight.empty() && loss.kind != Loss::kBceWithLogits)
    only_for("pos_weight", "bce_with_logits");
  if (loss.label_smoothing > 0 && loss.kind != Loss::kCrossEntropy)
    only_for("label_smoothing", "cross_entropy");
  // torch applies smoothing to samples of such a class, although they do not count in the mean.
  if (loss.label_smoothing > 0 &&
      std::find(loss.class_weights.begin(), loss.class_weights.end(), 0.0) != loss.class_weights.end())
    model.fail(
        "label_smoothing",
        "found beside a class of weight 0 in model.class_weights; expected weights above 0, or no smoothing");
}

void check_metrics(const config::Section& model, const std::vector<std::string>& names, Loss loss) {
  const std::vector<std::string> known = metric_names(loss);
  if (!names.empty() && known.empty())
    model.fail("metrics",
               "found beside model.loss model, where only the loss is known; expected a loss function as "
               "model.loss");
  for (const std::string& name : names)
    if (std::find(known.begin(), known.end(), name) == known.end())
      model.fail("metrics", str("found \"", name, "\"", config::did_you_mean(name, known),
                                "; expected some of ", join(known, ", "), " for model.loss ", name_of(loss)));
}

void read_split(const config::Section& data, TensorsOptions& options) {
  options.eval_fraction = data.number("eval_fraction", options.eval_fraction, 0.0, 0.9);
  options.random_split =
      data.choice("split", data.has("split_seed") ? "random" : "tail", {"tail", "random"}) == "random";
  options.split_seed = static_cast<uint64_t>(data.integer("split_seed", 0, 0, kLargestSeed));
}

void check_split(const config::Section& data, const TensorsOptions& options) {
  if (!options.eval_files.empty() && options.eval_fraction > 0)
    data.fail("eval_fraction",
              str("found ", options.eval_fraction, " beside data.eval_path; expected one of the two"));
  if (!options.random_split && options.split_seed != 0)
    data.fail(
        "split_seed",
        "found beside data.split \"tail\", which is not random; expected data.split \"random\", or no seed");
}

}  // namespace

TensorsOptions read_tensors_options(const config::Section& model, const config::Section& data) {
  TensorsOptions options;
  model.required_text("type");
  options.model_path = model.required_text("path");
  options.eval_model_path = model.text("eval_path", options.eval_model_path);
  options.loss = read_loss(model);
  options.metrics = model.texts("metrics", default_metrics(options.loss.kind));
  model.finish();
  check_loss(model, options.loss);
  check_metrics(model, options.metrics, options.loss.kind);
  data.required_text("type");
  options.files = files_of(data, "path");
  options.eval_files = files_of(data, "eval_path");
  read_split(data, options);
  options.shuffle = data.boolean("shuffle", options.shuffle);
  options.inputs = data.texts("inputs", {});
  options.target = data.text("target", options.target);
  data.finish();
  if (options.files.empty()) {
    data.required_text("path");
    data.fail("path", "found \"\"; expected the name of a file, or a list of them");
  }
  check_split(data, options);
  if (options.inputs.empty())
    data.fail("inputs", "is missing; expected the names of the tensors that forward takes, such as [\"x\"]");
  if (options.target.empty() && options.loss.kind != Loss::kModel)
    data.fail("target", str("is missing; expected the name of a tensor, which model.loss ",
                            name_of(options.loss.kind), " needs"));
  return options;
}

}  // namespace tessera::examples

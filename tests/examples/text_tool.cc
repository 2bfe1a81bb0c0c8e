// The text_classification example for hugging_face_*_test.py; JSON from stdin to stdout:
//   text_tool tokens character|wordpiece VOCAB LOWER_CASE MAX_LENGTH   ["text", …]  ->  [[1, 2], …]
//   text_tool bert   {"model": {…}, "weights": PATH, "input_ids": […], "attention_mask": […],
//   "token_type_ids": […]}
//                    ->  {"hidden": [[[…]]], "logits": [[…]]}, in evaluation mode
#include <ATen/ATen.h>

#include <iostream>
#include <nlohmann/json.hpp>
#include <vector>

#include "comm/init/self.h"
#include "core/log.h"
#include "examples/text_classification/task.h"

namespace {

using namespace tessera;
using nlohmann::json;

json tokens(const std::vector<std::string>& args) {
  const bool lower_case = args.at(2) == "true";
  const auto vocabulary = examples::Vocabulary::read(args.at(1));
  std::unique_ptr<examples::Tokenizer> tokenizer;
  if (args.at(0) == "character")
    tokenizer = std::make_unique<examples::CharacterTokenizer>(vocabulary, lower_case);
  if (args.at(0) == "wordpiece")
    tokenizer = std::make_unique<examples::WordPieceTokenizer>(vocabulary, lower_case);
  json result = json::array();
  for (const json& text : json::parse(std::cin))
    result.push_back(tokenizer->encode(text.get<std::string>(), std::stoll(args.at(3))));
  return result;
}

at::Tensor tensor_of(const json& rows) {  // (B, T) int64
  std::vector<int64_t> values;
  for (const json& row : rows)
    for (const json& value : row) values.push_back(value.get<int64_t>());
  return at::tensor(values, at::kLong).view({static_cast<int64_t>(rows.size()), -1});
}

json json_of(const at::Tensor& tensor) {
  if (tensor.dim() == 0) return tensor.item<double>();
  json rows = json::array();
  for (int64_t i = 0; i < tensor.size(0); ++i) rows.push_back(json_of(tensor[i]));
  return rows;
}

json bert() {
  const json request = json::parse(std::cin);
  const config::Origins origins("stdin");
  const json data = {
      {"type", "labelled_text"}, {"path", ""}, {"labels", request.at("labels")}};  // the texts are not needed
  const auto options = examples::read_text_classification_options(
      config::Section(request.at("model"), "model", origins), config::Section(data, "data", origins));
  BertForSequenceClassification model(options.model);
  EngineConfig config;
  config.train_batch_size = config.train_micro_batch_size_per_gpu = 1;
  const auto engine =
      initialize(model.ptr(), config, std::make_shared<comm::SelfCommunicator>(comm::SimulatedGroup{}),
                 {.log = Logger(LogOptions{})});
  engine->load_weights(request.at("weights").get<std::string>(), examples::bert_init_weights());
  engine->eval();
  const at::NoGradGuard no_grad;
  const at::Tensor ids = tensor_of(request.at("input_ids")), mask = tensor_of(request.at("attention_mask")),
                   types = tensor_of(request.at("token_type_ids"));
  return {{"hidden", json_of(model->bert->forward(ids, mask, types))},
          {"logits", json_of(engine->forward(ids, mask, types))}};
}

}  // namespace

int main(int argc, char** argv) try {
  const std::vector<std::string> args(argv + 1, argv + argc);
  std::cout << (args.at(0) == "tokens" ? tokens({args.begin() + 1, args.end()}) : bert()) << "\n";
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 1;
}

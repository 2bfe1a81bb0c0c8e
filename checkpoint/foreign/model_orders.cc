// [Note: orders of transformers' models]
// A safetensors file has its names sorted, so that the order of the model's parameters is lost, by which
// torch.optim numbers its state. config.json names the architecture, whose order is that in which its modules
// are made. A line below has the words of an architecture's names such that, wherever two of them are in one
// module, the one that is made first is first; layers come by their numbers. A test compares the lines with
// the library. Only architectures are here of which all releases have one order, or orders that differ in
// shapes, which name_groups() compares. A name with another word, as of a model that was changed, has no
// order.
#include "checkpoint/foreign/model_orders.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <string_view>
#include <utility>

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

struct Architecture {
  std::string_view model_types;  // separated by spaces
  std::string_view words;
};

constexpr std::string_view kLlamaWords =
    "model embed_tokens layers self_attn mlp input_layernorm post_attention_layernorm "
    "pre_feedforward_layernorm post_feedforward_layernorm norm q_proj k_proj v_proj o_proj q_norm k_norm "
    "gate_proj up_proj down_proj weight bias lm_head score";

constexpr std::array kArchitectures = {
    Architecture{"llama mistral qwen2 qwen3 gemma gemma2 gemma3_text olmo2 smollm3", kLlamaWords},
    Architecture{"phi3",
                 "model embed_tokens layers self_attn mlp o_proj qkv_proj gate_up_proj down_proj "
                 "input_layernorm post_attention_layernorm norm weight lm_head"},
    Architecture{"phi",
                 "model embed_tokens layers self_attn q_proj k_proj v_proj dense mlp fc1 fc2 input_layernorm "
                 "final_layernorm weight bias lm_head"},
    Architecture{
        "gpt2", "transformer wte wpe h ln_1 attn ln_2 mlp c_attn c_fc c_proj ln_f weight bias lm_head score"},
    Architecture{"gpt_neox",
                 "gpt_neox embed_in layers input_layernorm post_attention_layernorm attention mlp "
                 "query_key_value dense dense_h_to_4h dense_4h_to_h final_layer_norm weight bias lm_head "
                 "embed_out"},
    Architecture{"opt",
                 "weight bias model decoder embed_tokens embed_positions self_attn k_proj v_proj q_proj "
                 "out_proj self_attn_layer_norm fc1 fc2 final_layer_norm layers lm_head"},
    Architecture{
        "bert",
        "weight bias bert embeddings word_embeddings position_embeddings token_type_embeddings encoder layer "
        "attention self query key value intermediate output pooler predictions transform dense "
        "LayerNorm decoder seq_relationship cls classifier qa_outputs"},
    Architecture{"distilbert",
                 "distilbert embeddings word_embeddings position_embeddings LayerNorm transformer layer "
                 "attention q_lin k_lin v_lin out_lin sa_layer_norm ffn lin1 lin2 output_layer_norm weight "
                 "bias vocab_transform vocab_layer_norm vocab_projector pre_classifier classifier "
                 "qa_outputs"},
};

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> out;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    out.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

}  // namespace

std::vector<std::string> known_order(const json& config, const std::vector<SavedTensor>& entries) {
  const auto type = config.is_object() ? config.find("model_type") : config.end();
  if (!config.is_object() || type == config.end() || !type->is_string()) return {};
  std::map<std::string_view, int64_t> places;
  for (const Architecture& architecture : kArchitectures)
    for (const std::string_view name : split(architecture.model_types, ' '))
      if (name == type->get_ref<const std::string&>())
        for (const std::string_view word : split(architecture.words, ' '))
          places.emplace(word, static_cast<int64_t>(places.size()));
  if (places.empty()) return {};
  std::vector<std::pair<std::vector<std::pair<bool, int64_t>>, std::string>> order;
  for (const SavedTensor& entry : entries) {
    std::vector<std::pair<bool, int64_t>> key;
    for (const std::string_view part : split(entry.name, '.')) {
      int64_t number = 0;
      const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), number);
      const bool is_number = error == std::errc() && end == part.data() + part.size();
      const auto place = places.find(part);
      if (!is_number && place == places.end()) return {};
      key.emplace_back(!is_number, is_number ? number : place->second);
    }
    order.emplace_back(std::move(key), entry.name);
  }
  std::sort(order.begin(), order.end());
  std::vector<std::string> names;
  for (auto& [key, name] : order) names.push_back(std::move(name));
  return names;
}

}  // namespace tessera::checkpoint

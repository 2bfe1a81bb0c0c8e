#include "activations/operator_facts.h"

#include <ATen/Context.h>
#include <ATen/core/function_schema.h>

#include <algorithm>
#include <bit>
#include <set>
#include <string_view>
#include <unordered_set>

#include "zero/deferred/operator_log.h"
#include "zero/operators/per_operator.h"

namespace tessera::activations {
namespace {

using Names = std::unordered_set<std::string_view>;

// The reviewed lists. A name stands for its in-place form, too: "relu" for "relu_". Operators with the tag
// pointwise, and views, need not be here.

/// Repeatable, and they cost bytes rather than FLOPs.
const Names& cheap_names() {
  static const Names names = {
      // norms and softmax
      "_batch_norm_no_update", "_fused_rms_norm", "_log_softmax", "_masked_softmax",
      "_native_batch_norm_legit_no_training", "_safe_softmax", "_softmax", "_weight_norm_interface",
      "cudnn_batch_norm", "native_batch_norm", "native_group_norm", "native_layer_norm",
      // random: by the recorded state of the generator
      "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "native_dropout", "normal", "rand",
      "rand_like", "randint", "randint_like", "randn", "randn_like", "random", "uniform", "_fused_dropout",
      // copies and casts
      "_conj_physical", "_prelu_kernel", "_reshape_copy", "_stack", "_to_copy", "_unsafe_view", "cat",
      "channel_shuffle", "clone", "complex", "constant_pad_nd", "copy", "diag_embed", "flip", "floor_divide",
      "glu", "hardswish", "log_sigmoid_forward", "masked_fill", "pixel_shuffle", "pixel_unshuffle", "polar",
      "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "repeat", "replication_pad1d",
      "replication_pad2d", "replication_pad3d", "roll", "rot90", "stack", "tril", "triu", "unsafe_split",
      "unsafe_split_with_sizes",
      // reductions
      "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "all", "amax", "amin", "aminmax", "any", "argmax",
      "argmin", "avg_pool2d", "avg_pool3d", "count_nonzero", "dist", "linalg_vector_norm", "logsumexp", "max",
      "max_pool2d_with_indices", "max_pool3d_with_indices", "mean", "min", "nansum", "norm", "prod", "std",
      "std_mean", "sum", "var", "var_mean",
      // made of numbers alone
      "arange", "eye", "linspace", "tril_indices", "triu_indices"};
  return names;
}

/// Repeatable.
const Names& other_names() {
  static const Names names = {
      // products
      "_addmm_activation", "_cdist_forward", "_euclidean_dist", "_int_mm", "_trilinear", "addbmm", "addmm",
      "addmv", "addr", "baddbmm", "bmm", "dot", "linalg_cross", "linear", "matmul", "mm", "mv", "vdot",
      // convolutions
      "_conv_depthwise2d", "_convolution", "_slow_conv2d_forward", "conv_depthwise3d", "conv_tbc",
      "convolution", "convolution_overrideable", "cudnn_convolution", "cudnn_convolution_add_relu",
      "cudnn_convolution_relu", "cudnn_convolution_transpose", "mkldnn_convolution", "slow_conv3d_forward",
      "slow_conv_dilated2d", "slow_conv_dilated3d", "slow_conv_transpose2d", "slow_conv_transpose3d",
      // attention, recurrent cells and layers
      "_efficient_attention_forward", "_flash_attention_forward", "_scaled_dot_product_cudnn_attention",
      "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
      "_scaled_dot_product_flash_attention_for_cpu", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell",
      "_transform_bias_rescale_qkv", "mkldnn_rnn_layer",
      // by index
      "_embedding_bag", "_embedding_bag_forward_only", "_unsafe_index", "bucketize", "diagonal_scatter",
      "embedding", "gather", "index", "index_add", "index_fill", "index_select", "masked_scatter",
      "masked_select", "nonzero", "repeat_interleave", "scatter_add", "searchsorted", "select_scatter",
      "slice_scatter", "take",
      // along a dimension
      "_fft_c2c", "_fft_c2r", "_fft_r2c", "_logcumsumexp", "cummax", "cummin", "cumprod", "cumsum",
      "kthvalue", "logcumsumexp", "median", "nanmedian", "sort", "topk",
      // pictures
      "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d",
      "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
      "affine_grid_generator", "col2im", "grid_sampler_2d", "grid_sampler_3d", "im2col", "upsample_bicubic2d",
      "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d",
      "upsample_nearest3d", "upsample_trilinear3d",
      // losses
      "binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "mse_loss",
      "multi_margin_loss", "multilabel_margin_loss_forward", "nll_loss2d_forward", "nll_loss_forward",
      "smooth_l1_loss", "soft_margin_loss"};
  return names;
}

/// Views and pointwise operators that are not repeatable: of memory as it lies, of forward-mode autograd, of
/// one value that something else may fill.
const Names& excluded_names() {
  static const Names names = {"_autocast_to_full_precision",
                              "_autocast_to_reduced_precision",
                              "_fw_primal",
                              "_make_dual",
                              "_unpack_dual",
                              "as_strided",
                              "as_strided_scatter",
                              "fill",
                              "full_like",
                              "lift_fresh",
                              "ones_like",
                              "pin_memory",
                              "rrelu_with_noise",
                              "zero",
                              "zeros_like"};
  return names;
}

/// They overwrite their argument without reading it.
const Names& overwriting_names() {
  static const Names names = {"bernoulli",  "cauchy", "copy",   "exponential", "geometric",
                              "log_normal", "normal", "random", "uniform"};
  return names;
}

const Names& any_order_names() {
  static const Names names = {"cumprod",        "cumsum",       "index_add",          "kthvalue",
                              "median",         "nanmedian",    "nll_loss2d_forward", "scatter_add",
                              "_embedding_bag", "logcumsumexp", "_logcumsumexp"};
  return names;
}

/// "aten::relu_" -> "relu".
std::string_view functional_name(std::string_view name, bool in_place) {
  name.remove_prefix(std::string_view("aten::").size());
  if (in_place && name.ends_with('_')) name.remove_suffix(1);
  return name;
}

bool is_of(const OperatorFacts& facts, std::string_view name_space) {
  return facts.name.starts_with(name_space) &&
         std::string_view(facts.name).substr(name_space.size(), 2) == "::";
}

bool has_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  const auto contained = type.containedTypes();
  return std::any_of(contained.begin(), contained.end(),
                     [](const auto& inner) { return has_tensors(*inner); });
}

void read_arguments(OperatorFacts& facts, const c10::FunctionSchema& schema) {
  facts.num_arguments = schema.arguments().size();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const c10::AliasInfo* alias = argument.alias_info();
    if (alias != nullptr && alias->isWrite() && i < 64) facts.written_arguments |= uint64_t{1} << i;
    if (argument.name() == "generator" &&
        argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())))
      facts.generator_argument = static_cast<int>(i);
    if (argument.name() == "running_mean") facts.first_statistic = static_cast<int>(i);
    if (argument.name() == "training") facts.training_argument = static_cast<int>(i);
  }
  // The same argument, under the name that each overload has for it.
  const bool statistics = facts.written_arguments == 0 && !facts.composite && facts.training_argument >= 0 &&
                          facts.first_statistic >= 0 && is_of(facts, "aten");
  if (!statistics) {
    facts.first_statistic = facts.training_argument = -1;
  } else {
    facts.written_arguments = uint64_t{3} << facts.first_statistic;
  }
}

/// Their schemas say that they write, but they do not write memory.
bool writes_no_memory(std::string_view name) {
  return name == "aten::requires_grad_" || name == "aten::retain_grad" || name == "aten::set_data";
}

/// Schemas that say nothing of what is written, or too little.
bool may_write_all(const OperatorFacts& facts, const c10::FunctionSchema& schema) {
  if (is_of(facts, "c10d") || is_of(facts, "_c10d_functional") || is_of(facts, "c10d_functional"))
    return true;
  if (facts.written_arguments != 0 || is_of(facts, "aten")) return false;
  const bool returns_tensors =
      std::any_of(schema.returns().begin(), schema.returns().end(),
                  [](const c10::Argument& result) { return has_tensors(*result.type()); });
  return schema.aliasAnalysis() == c10::AliasAnalysisKind::CONSERVATIVE || schema.name().ends_with('_') ||
         !returns_tensors;
}

void read_schema(OperatorFacts& facts, const c10::FunctionSchema& schema) {
  read_arguments(facts, schema);
  facts.opaque = !is_of(facts, "aten") && !is_of(facts, "prim");
  if (may_write_all(facts, schema)) facts.written_arguments = ~uint64_t{0};
  if (writes_no_memory(facts.name)) facts.written_arguments = 0;
  if (!is_of(facts, "aten") || facts.num_arguments >= 64 || schema.is_vararg() || schema.is_varret()) return;
  bool returns_alias = false, returns_tensors = false;
  for (const c10::Argument& result : schema.returns()) {
    returns_tensors = returns_tensors || has_tensors(*result.type());
    returns_alias = returns_alias || result.alias_info() != nullptr;
  }
  if (!returns_tensors) return;
  const bool writes = facts.written_arguments != 0 && facts.first_statistic < 0;
  if (writes) {
    // One argument, which is also the one result. Not `out`: it may get another size.
    const int argument = std::countr_zero(facts.written_arguments);
    const bool in_place = std::popcount(facts.written_arguments) == 1 && schema.returns().size() == 1 &&
                          returns_alias && !schema.arguments()[argument].is_out() &&
                          schema.arguments()[argument].type()->kind() == c10::TypeKind::TensorType;
    if (!in_place) return;
    facts.in_place_argument = argument;
  }
  const std::string_view name = functional_name(facts.name, writes);
  const bool statistics_unknown = name.find("batch_norm") != name.npos && facts.first_statistic < 0 &&
                                  name != "_native_batch_norm_legit_no_training" &&
                                  name != "_batch_norm_no_update";
  if (excluded_names().contains(name) || statistics_unknown) return;
  const bool view = returns_alias && !writes && !facts.call->hasTag(at::Tag::maybe_aliasing_or_mutating);
  const bool pointwise = facts.call->hasTag(at::Tag::pointwise);
  facts.cheap = view || pointwise || cheap_names().contains(name);
  facts.repeatable = facts.cheap || other_names().contains(name);
  facts.overwrites = facts.repeatable && writes && overwriting_names().contains(name);
  facts.adds_in_any_order_on_cuda = any_order_names().contains(name);
}

}  // namespace

OperatorFacts::OperatorFacts(const c10::OperatorHandle& op)
    : name(op.operator_name().name),
      call(op),
      composite(op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)),
      random(op.hasTag(at::Tag::nondeterministic_seeded)) {
  read_schema(*this, op.schema());
}

const OperatorFacts* facts_of(const zero::OperatorCall& call) {
  static const OperatorFacts compiled_graph("a graph of torch.compile");
  return call.is_graph() ? &compiled_graph : zero::PerOperator<OperatorFacts>::of(call.function());
}

std::vector<at::Tensor> written_tensors(const OperatorFacts& facts, c10::ArrayRef<const c10::IValue> inputs) {
  std::vector<at::Tensor> tensors;
  if (facts.written_arguments == 0) return tensors;
  if (facts.training_argument >= 0 && static_cast<size_t>(facts.training_argument) < inputs.size() &&
      inputs[facts.training_argument].isBool() && !inputs[facts.training_argument].toBool())
    return tensors;
  for (size_t i = 0; i < inputs.size() && i < 64; ++i)
    if ((facts.written_arguments >> i & 1) != 0)
      zero::deferred::visit_tensors(inputs[i], [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

std::vector<std::string> operator_names() {
  std::set<std::string> names;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) names.insert(name.name);
  return {names.begin(), names.end()};
}

}  // namespace tessera::activations

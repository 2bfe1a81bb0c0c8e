#include "activations/operator_facts.h"

#include <ATen/core/function_schema.h>

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

namespace tessera::activations {
namespace {

/// Beside those that libtorch tags as pointwise and those that return a view.
constexpr std::array kCheap = {"aten::native_layer_norm",
                               "aten::native_group_norm",
                               "aten::native_batch_norm",
                               "aten::cudnn_batch_norm",
                               "aten::_fused_rms_norm",
                               "aten::_softmax",
                               "aten::_log_softmax",
                               "aten::_to_copy",
                               "aten::clone",
                               "aten::copy_",
                               "aten::native_dropout",
                               "aten::bernoulli_",
                               "aten::bernoulli",
                               "aten::empty",
                               "aten::empty_like",
                               "aten::empty_strided",
                               "aten::zeros_like",
                               "aten::ones_like",
                               "aten::full_like",
                               "aten::rand_like",
                               "aten::rand",
                               "aten::cat",
                               "aten::stack",
                               "aten::masked_fill",
                               "aten::masked_fill_",
                               "aten::repeat",
                               "aten::tril",
                               "aten::triu",
                               "aten::sum",
                               "aten::mean",
                               "aten::max_pool2d_with_indices",
                               "aten::_reshape_copy",
                               "aten::constant_pad_nd",
                               "aten::glu",
                               "aten::arange",
                               "aten::zeros",
                               "aten::ones",
                               "aten::full",
                               "aten::scalar_tensor"};

/// They keep state outside of their arguments, or write what their schema does not name.
constexpr std::array kNotRepeatable = {"aten::_cudnn_rnn",
                                       "aten::miopen_rnn",
                                       "aten::miopen_batch_norm",
                                       "aten::set_",
                                       "aten::resize_",
                                       "aten::cudnn_batch_norm_backward",
                                       "aten::_local_scalar_dense",
                                       "aten::rrelu_with_noise"};

template <size_t kSize>
bool contains(const std::array<const char*, kSize>& names, std::string_view name) {
  return std::any_of(names.begin(), names.end(), [&](std::string_view other) { return other == name; });
}

void read_schema(OperatorFacts& facts, const c10::FunctionSchema& schema) {
  bool returns_alias = false;
  facts.num_arguments = schema.arguments().size();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const c10::AliasInfo* alias = argument.alias_info();
    if (alias != nullptr && alias->isWrite() && i < 64) facts.written_arguments |= uint64_t{1} << i;
    if (argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())) &&
        argument.name() == "generator")
      facts.generator_argument = static_cast<int>(i);
    if (argument.name() == "running_mean") facts.first_statistic = static_cast<int>(i);
    if (argument.name() == "training") facts.training_argument = static_cast<int>(i);
  }
  for (const c10::Argument& result : schema.returns())
    if (result.alias_info() != nullptr) returns_alias = true;
  if (facts.name != "aten::native_batch_norm" && facts.name != "aten::cudnn_batch_norm")
    facts.first_statistic = facts.training_argument = -1;
  // Written arguments: one, which is also the one result.
  const bool plain_in_place = facts.in_place() && std::popcount(facts.written_arguments) == 1 &&
                              schema.returns().size() == 1 && returns_alias && !schema.is_vararg();
  const bool batch_norm = facts.name.find("batch_norm") != std::string::npos;
  facts.repeatable = (!facts.in_place() || plain_in_place) && !schema.returns().empty() &&
                     facts.num_arguments < 64 && !contains(kNotRepeatable, facts.name) &&
                     !schema.is_vararg() && !schema.is_varret() &&
                     (!batch_norm || facts.first_statistic >= 0);
  const bool view = returns_alias && !facts.in_place();
  facts.cheap =
      facts.repeatable && (view || facts.call->hasTag(at::Tag::pointwise) || contains(kCheap, facts.name));
}

OperatorFacts read_facts(const at::RecordFunction& function) {
  OperatorFacts facts;
  facts.name = function.name();
  const auto name = function.operator_name();
  if (!name) return facts;
  facts.call = c10::Dispatcher::singleton().findSchema(*name);
  if (!facts.call) return facts;
  facts.random = facts.call->hasTag(at::Tag::nondeterministic_seeded);
  facts.composite = facts.call->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  read_schema(facts, facts.call->schema());
  return facts;
}

}  // namespace

// By the address of an operator's name, which its schema owns: each overload has its own.
const OperatorFacts& facts_of(const at::RecordFunction& function) {
  thread_local std::unordered_map<const char*, const OperatorFacts*> seen;
  const char* const name = function.name();
  const OperatorFacts*& known = seen[name];
  if (known != nullptr) return *known;
  static std::mutex mutex;
  static std::unordered_map<const char*, std::unique_ptr<OperatorFacts>> all;
  const std::lock_guard lock(mutex);
  std::unique_ptr<OperatorFacts>& facts = all[name];
  if (!facts) facts = std::make_unique<OperatorFacts>(read_facts(function));
  known = facts.get();
  return *known;
}

}  // namespace tessera::activations

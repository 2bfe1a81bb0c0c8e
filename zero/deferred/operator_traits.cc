#include "zero/deferred/operator_traits.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace tessera::zero::deferred {
namespace {

using c10::DispatchKey;

// In-place operators that overwrite their first argument and never read it. (Of the random ones, how much
// they draw depends on the argument's shape alone.)
constexpr std::array<std::string_view, 10> kFills = {
    "aten::uniform_",    "aten::normal_",    "aten::random_", "aten::exponential_", "aten::cauchy_",
    "aten::log_normal_", "aten::geometric_", "aten::zero_",   "aten::fill_",        "aten::copy_"};
// These operators have a composite kernel that reads and writes memory.
constexpr std::array<std::string_view, 1> kCompositesThatCompute = {"aten::copy_"};
constexpr std::array<std::string_view, 2> kUninitialized = {"aten::empty", "aten::empty_strided"};
constexpr std::array<std::string_view, 3> kResizes = {"aten::resize_", "aten::resize_as_",
                                                      "aten::_resize_output_"};

template <size_t n>
bool among(const std::array<std::string_view, n>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_composite(const c10::OperatorHandle& op, std::string_view name) {
  if (among(kCompositesThatCompute, name)) return false;
  if (op.hasKernelForDispatchKey(DispatchKey::CPU) || op.hasKernelForDispatchKey(DispatchKey::CUDA))
    return false;
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments())
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) return false;
  return !schema.returns().empty() &&
         std::all_of(schema.returns().begin(), schema.returns().end(),
                     [](const c10::Argument& value) { return value.alias_info() != nullptr; });
}

OperatorKind kind_of(const c10::OperatorHandle& op, const OperatorTraits& traits) {
  const std::string_view name = op.operator_name().name;
  const c10::FunctionSchema& schema = op.schema();
  if (is_composite(op, name)) return OperatorKind::kComposite;
  if (among(kResizes, name)) return OperatorKind::kResize;
  if (op.hasTag(at::Tag::inplace_view) || is_view(schema)) return OperatorKind::kView;
  if (among(kUninitialized, name) && !traits.only_writes) return OperatorKind::kUninitialized;
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape) ||
      op.hasTag(at::Tag::maybe_aliasing_or_mutating))
    return OperatorKind::kOpaque;
  if (!name.starts_with("aten::")) return OperatorKind::kOpaque;
  for (size_t i = 0; i < traits.returns.size(); ++i)
    if (schema.returns()[i].type()->kind() != c10::TypeKind::TensorType) return OperatorKind::kOpaque;
  if (schema.returns().empty() &&
      std::find(traits.written.begin(), traits.written.end(), true) == traits.written.end())
    return OperatorKind::kOpaque;
  return OperatorKind::kCompute;
}

}  // namespace

OperatorTraits::OperatorTraits(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const bool fills =
      among(kFills, op.operator_name().name) ||
      (op.operator_name().name == "aten::bernoulli_" && op.operator_name().overload_name == "float");
  random = op.hasTag(at::Tag::nondeterministic_seeded);
  const std::vector<c10::Argument>& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* alias = arguments[i].alias_info();
    const bool is_written = alias != nullptr && alias->isWrite();
    written.push_back(is_written);
    not_read.push_back(is_written && (arguments[i].is_out() || (fills && i == 0)));
    if (arguments[i].name() == "generator") generator = static_cast<int>(i);
    if (arguments[i].name() == "device") device = static_cast<int>(i);
  }
  only_writes = true;
  for (const c10::Argument& value : schema.returns()) {
    int is_argument = -1;
    if (value.alias_info() != nullptr && value.alias_info()->isWrite())
      for (size_t i = 0; i < arguments.size(); ++i)
        if (written[i] && arguments[i].alias_info()->beforeSets() == value.alias_info()->beforeSets())
          is_argument = static_cast<int>(i);
    if (is_argument < 0) only_writes = false;
    returns.push_back(is_argument);
  }
  kind = kind_of(op, *this);
}

}  // namespace tessera::zero::deferred

#include "engine/profile/operator_origin.h"

#include <ATen/core/ivalue.h>

#include <cstring>
#include <string_view>
#include <utility>

#include "zero/gather/operator_listener.h"
#include "zero/memory/unit_memory.h"

namespace tessera {
namespace {

/// An operator, or a node of backward. Not Tensor::backward(), in which all of backward would be nested, nor
/// what code marks for profilers.
bool is_call(const at::RecordFunction& function) {
  if (zero::residency_at_work()) return false;
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) return true;
  constexpr std::string_view kAten = "aten::";
  if (std::strncmp(function.name(), kAten.data(), kAten.size()) == 0)
    return std::strcmp(function.name() + kAten.size(), "_backward") != 0;
  return function.operator_name().has_value();
}

/// "blocks.3.attention.qkv" of its weight.
std::string module_of(const std::string& parameter) {
  const size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? "the model" : parameter.substr(0, dot);
}

uint64_t key_of(uint64_t thread, int64_t sequence) {
  return (thread << 44) ^ static_cast<uint64_t>(sequence);
}

}  // namespace

OperatorOrigin::Place& OperatorOrigin::here() {
  thread_local Place place;
  return place;
}

OperatorOrigin::OperatorOrigin(const zero::Layout* layout, Intern intern) : intern_(std::move(intern)) {
  here() = {};
  if (layout == nullptr) return;
  modules_.resize(static_cast<size_t>(layout->num_units()));
  for (int i = 0; i < layout->num_parameters(); ++i)
    modules_[static_cast<size_t>(layout->slice(i).unit)][layout->slice(i).offset] =
        intern_(module_of(layout->parameters()[static_cast<size_t>(i)].name));
}

int OperatorOrigin::module_of_inputs(const at::RecordFunction& function) const {
  for (const c10::IValue& value : function.inputs()) {
    if (!value.isTensor()) continue;
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || !tensor.has_storage()) continue;
    const zero::UnitHandle* const unit =
        zero::find_unit(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    if (unit == nullptr || unit->unit < 0 || static_cast<size_t>(unit->unit) >= modules_.size()) continue;
    const std::map<int64_t, int>& parameters = modules_[static_cast<size_t>(unit->unit)];
    const auto after = parameters.upper_bound(tensor.storage_offset());
    if (after != parameters.begin()) return std::prev(after)->second;
  }
  return -1;
}

void OperatorOrigin::begin(const at::RecordFunction& function) {
  if (!is_call(function)) return;
  Place& place = here();
  const bool backward = function.scope() == at::RecordScope::BACKWARD_FUNCTION;
  if (place.depth++ == 0) {
    place.in_backward = backward;
    place.op = intern_(function.name());
    const int module = backward ? -1 : module_of_inputs(function);
    if (module >= 0) place.module = module;
    const std::lock_guard lock(mutex_);
    place.call = ++num_calls_;
    if (backward) {
      const auto found = of_forward_.find(key_of(function.forwardThreadId(), function.seqNr()));
      place.module = found == of_forward_.end() ? -1 : found->second;
    }
  }
  if (place.in_backward || function.seqNr() < 0) return;
  // The next node gets this number; of several operators that announce it the last one makes it.
  const std::lock_guard lock(mutex_);
  of_forward_[key_of(at::RecordFunction::currentThreadId(), function.seqNr())] = place.module;
}

void OperatorOrigin::end(const at::RecordFunction& function) {
  if (!is_call(function)) return;
  Place& place = here();
  if (place.depth == 0 || --place.depth > 0) return;
  place.call = 0;
  place.op = -1;
  if (place.in_backward) place.module = -1;
}

}  // namespace tessera

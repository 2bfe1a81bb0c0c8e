#include "engine/profile/operator_origin.h"

#include <ATen/core/ivalue.h>

#include <utility>

#include "zero/memory/unit_memory.h"

namespace tessera {
namespace {

/// "blocks.3.attention.qkv" of its weight.
std::string module_of(const std::string& parameter) {
  const size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? "the model" : parameter.substr(0, dot);
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

int OperatorOrigin::module_of_inputs(const zero::OperatorCall& call) const {
  for (const c10::IValue& value : call.inputs()) {
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

void OperatorOrigin::begin(const zero::OperatorCall& call) {
  Place& place = here();
  if (place.depth++ == 0) {
    place.in_backward = call.is_node();
    place.op = intern_(call.name());
    place.call = ++num_calls_;
    if (call.is_node())
      place.module = modules_of_forward_.of(call.function()).value_or(-1);
    else if (const int module = module_of_inputs(call); module >= 0)
      place.module = module;
  }
  if (!place.in_backward && call.function().seqNr() >= 0)
    modules_of_forward_.note(call.function(), [&](int& module) { module = place.module; });
}

void OperatorOrigin::end() {
  Place& place = here();
  if (place.depth == 0 || --place.depth > 0) return;
  place.call = 0;
  place.op = -1;
  if (place.in_backward) place.module = -1;
}

}  // namespace tessera

#include "zero/unit/parameter_versions.h"

#include <torch/csrc/autograd/variable.h>

#include "comm/torch_dtype.h"
#include "core/error.h"
#include "core/str.h"

namespace tessera::zero {

static uint32_t version_of(const at::Tensor& tensor) {
  const c10::VariableVersion& counter = torch::autograd::impl::version_counter(tensor);
  return counter.enabled() ? counter.current_version() : 0;
}

ParameterVersions::ParameterVersions(const Layout& layout, const std::vector<ParamUnit>& units,
                                     std::vector<at::Tensor> parameters)
    : layout_(layout),
      units_(units),
      parameters_(std::move(parameters)),
      versions_(parameters_.size()),
      left_by_exception_(parameters_.size()) {
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    // Parameters that were slices of one tensor share a counter still, and no memory any more.
    const at::Tensor& tensor = parameters_[parameter];
    if (torch::autograd::impl::version_counter(tensor).enabled())
      torch::autograd::impl::set_version_counter(tensor, c10::VariableVersion(version_of(tensor)));
    allow(static_cast<int>(parameter));
  }
}

void ParameterVersions::allow(int parameter) {
  versions_[parameter] = version_of(parameters_[parameter]);
  left_by_exception_[parameter] = false;
}

void ParameterVersions::leave(int parameter) {
  if (was_written(parameter)) left_by_exception_[parameter] = true;
}

bool ParameterVersions::was_written(int parameter) const {
  return version_of(parameters_[static_cast<size_t>(parameter)]) != versions_[static_cast<size_t>(parameter)];
}

void ParameterVersions::written_by_engine(int parameter) {
  torch::autograd::impl::bump_version(parameters_[parameter]);
  allow(parameter);
}

void ParameterVersions::check(bool replaces_values) const {
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    const at::Tensor& tensor = parameters_[parameter];
    const ParameterSpec& spec = layout_.parameters()[parameter];
    const ParamUnit& unit = units_[layout_.slice(static_cast<int>(parameter)).unit];
    if (!tensor.is_alias_of(unit.memory.full())) {
      const at::ScalarType before = to_torch(spec.dtype), now = tensor.scalar_type();
      throw Error(
          "parameter ", spec.name,
          " is not in the engine's memory any more: model->to(), set_data() or torch::load() has "
          "replaced its memory",
          before == now ? "" : str(", of ", c10::toString(before), ", by one of ", c10::toString(now)),
          ", and it would not be trained. Choose dtype (by the config) and device before initialize(); "
          "give values with load_weights(), or inside a GatheredParameters with modifier_rank set");
    }
    if (replaces_values || !was_written(static_cast<int>(parameter)) || unit.use.writers > 0) continue;
    if (left_by_exception_[parameter])
      throw Error("parameter ", spec.name,
                  " was written in a GatheredParameters that was left by an exception: no other rank has the "
                  "values. Call load_checkpoint() or load_weights() on all ranks, which replace all "
                  "parameters unless they are told to leave some out");
    throw Error("parameter ", spec.name,
                " was written in place outside of a GatheredParameters: the values would be lost, or "
                "differ between ranks. Write inside a GatheredParameters with modifier_rank set, or "
                "give values to all parameters with load_checkpoint() or load_weights()");
  }
}

}  // namespace tessera::zero

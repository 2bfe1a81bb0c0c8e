// Whole tensors out of the ranks' pieces, and the optimizer's states of whole parameters.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "core/check.h"
#include "core/error.h"
#include "core/str.h"
#include "zero/sharded_model.h"

namespace tessera::zero {

/// `mine`: (unit numel) if `whole`, else this rank's piece of the unit. Returns (unit numel) on the device.
at::Tensor ShardedModel::gather_unit(int unit, const at::Tensor& mine, bool whole, std::string_view what) {
  at::Tensor full = mine.to(options_.device);  // from the host, where it lies there
  if (whole) return full;
  const at::Tensor part = std::exchange(full, at::empty({layout_->units()[unit].numel}, full.options()));
  comm_->all_gather(full, part, str(what, " of ", layout_->describe(unit)))->wait();
  // From the order of ranks into that of pieces.
  return full.view({mesh_.num_rows(), mesh_.shard_size, part.numel()}).transpose(0, 1).reshape(-1);
}

/// An fp32 copy of the parameter's part of `full`, (unit numel).
at::Tensor ShardedModel::cut_out(int parameter, const at::Tensor& full) const {
  const zero::UnitSlice& slice = layout_->slice(parameter);
  return full.narrow(0, slice.offset, slice.numel)
      .to(at::kFloat, /*non_blocking=*/false, /*copy=*/true)
      .view(layout_->parameters()[parameter].shape);
}

std::vector<std::vector<at::Tensor>> ShardedModel::full_states(int index) {
  finish_updates();
  residency_->wait_all();
  ParamUnit& unit = units_.at(index);
  std::vector<std::vector<at::Tensor>> states(unit.spec.parameters.size());
  if (!unit.spec.trainable) return states;
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  const InMemory kept(unit, kUpdated, InMemory::Access::kRead);
  const bool whole = !unit.placement.updates_shard;
  const LocalState mine = whole ? unit.local_state() : unit.piece_state();
  for (size_t state = 0; state < state_names().size(); ++state) {
    const at::Tensor full = gather_unit(index, mine.states[state], whole, state_names()[state]);
    for (size_t i = 0; i < states.size(); ++i) states[i].push_back(cut_out(unit.spec.parameters[i], full));
  }
  return states;
}

void ShardedModel::set_states(const std::string& name, const std::vector<at::Tensor>& states,
                              int64_t num_updates) {
  const int parameter = find(name);
  const UnitSlice& slice = layout_->slice(parameter);
  ParamUnit& unit = units_[slice.unit];
  if (!unit.spec.trainable) throw Error(str("parameter ", name, " is frozen and has no optimizer state"));
  TESSERA_CHECK(states.empty() || states.size() == state_names().size());
  finish_updates();
  const PauseListening our_own_operators;
  const at::NoGradGuard no_grad;
  const InMemory kept(unit, kUpdated, InMemory::Access::kReadWrite);
  const LocalState local = unit.local_state();
  const Range range = intersect(slice.range(), local.range);
  for (size_t state = 0; range.numel() > 0 && state < local.states.size(); ++state) {
    const at::Tensor target = local.states[state].narrow(0, range.begin - local.range.begin, range.numel());
    if (states.empty())
      target.zero_();
    else
      target.copy_(states[state].reshape(-1).narrow(0, range.begin - slice.offset, range.numel()));
  }
  optimizer_->set_steps(parameter, num_updates);
}

}  // namespace tessera::zero

#include "zero/gathered_parameters.h"

#include <exception>
#include <set>

#include "core/error.h"
#include "zero/memory/pause_listening.h"

namespace tessera::zero {

GatheredParameters::GatheredParameters(ShardedModel& model, const std::vector<std::string>& names,
                                       std::optional<int> modifier_rank)
    : model_(model),
      modifier_rank_(modifier_rank.value_or(-1)),
      exceptions_before_(std::uncaught_exceptions()) {
  const PauseListening our_own_operators;
  const Layout& layout = model.layout();
  if (modifier_rank && (*modifier_rank < 0 || *modifier_rank >= layout.world_size()))
    throw Error("GatheredParameters: modifier_rank ", *modifier_rank, " is not a rank of 0 … ",
                layout.world_size() - 1);
  std::set<int> units;
  for (const std::string& name : names) {
    const int parameter = layout.find(name);
    if (parameter < 0) throw Error("GatheredParameters: the model has no parameter named ", name);
    units.insert(layout.slice(parameter).unit);
  }
  if (names.empty())
    for (int unit = 0; unit < layout.num_units(); ++unit) units.insert(unit);
  units_.assign(units.begin(), units.end());
  model_.pin(units_, modifier_rank.has_value());
}

GatheredParameters::~GatheredParameters() {
  if (!open_) return;
  try {
    std::uncaught_exceptions() > exceptions_before_ ? abandon() : close();
  } catch (...) {
    model_.residency().keep_failure(std::current_exception());
  }
}

void GatheredParameters::abandon() {
  if (!open_) return;
  open_ = false;
  model_.abandon(units_, /*writable=*/modifier_rank_ >= 0);
}

void GatheredParameters::close() {
  if (!open_) return;
  open_ = false;
  model_.unpin(units_, modifier_rank_);
}

}  // namespace tessera::zero

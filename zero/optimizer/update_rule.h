// UpdateRule: an optimizer's formula that is not one of Tessera's own. It is elementwise: what an element
// becomes depends on that element's weight, gradient and states alone, so a rank updates its shards without
// the others. Formulas that need norms of whole parameters (LAMB, Muon) are not of this kind.
//
//   struct RMSprop final : tessera::zero::UpdateRule {
//     std::string name() const override { return "RMSprop"; }
//     std::vector<std::string> state_names() const override { return {"square_avg"}; }
//     void update(const Elements& e, const Step& step) const override {
//       e.states[0].mul_(0.99).addcmul_(e.gradient, e.gradient, 0.01);
//       e.weights.addcdiv_(e.gradient, e.states[0].sqrt().add_(1e-8), -step.lr);
//     }
//   };
//   initialize(model, config, comm, {.update_rule = std::make_shared<RMSprop>()});
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::zero {

/// Computes the update of an optimizer that is not built in. Thread-safe: update() is const, and all that it
/// keeps between steps is in the states.
class UpdateRule {
 public:
  virtual ~UpdateRule() = default;

  /// Elements of one or several parameters of one param group, which have had as many updates.
  struct Elements {
    at::Tensor weights;  ///< (n) fp32, to be updated in place
    /// (n) fp32, finite. It is the mean over the global batch, unscaled and clipped; it may be overwritten.
    at::Tensor gradient;
    std::vector<at::Tensor> states;  ///< (n) fp32 each, to be updated in place; zeros before the first update
  };
  struct Step {
    int64_t number = 1;  ///< which update of these elements this is, from 1
    double lr = 0;       ///< of the schedule
    double weight_decay = 0;
  };

  /// Stands in checkpoints: one that another optimizer has saved is refused. All ranks must give equal rules:
  /// their names and the states' names are compared, other members are not.
  virtual std::string name() const = 0;
  /// Names of the states, in order; they stand in checkpoints.
  virtual std::vector<std::string> state_names() const = 0;
  /// Updates on the device of the tensors, by torch's operators (no gradient is recorded) or in their memory:
  /// they are contiguous, and slices may begin at any element.
  virtual void update(const Elements& elements, const Step& step) const = 0;
};

}  // namespace tessera::zero

// UpdateRule: an optimizer's formula that is not one of Tessera's own. It is elementwise: what an element
// becomes depends on that element's weight, gradient and states alone, so a rank updates its shards without
// the others. A formula that needs more of a parameter than one element is a WholeUpdateRule, below.
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
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace tessera::zero {

class WholeOptimizer;

struct UpdateStep {
  int64_t number = 1;  ///< which update of these elements this is, from 1
  double lr = 0;       ///< of the schedule
  double weight_decay = 0;
};

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
  using Step = UpdateStep;

  /// Stands in checkpoints: one that another optimizer has saved is refused. All ranks must give equal rules:
  /// their names and the states' names are compared, other members are not.
  virtual std::string name() const = 0;
  /// Names of the states, in order; they stand in checkpoints.
  virtual std::vector<std::string> state_names() const = 0;
  /// Updates on the device of the tensors, by torch's operators (no gradient is recorded) or in their memory:
  /// they are contiguous, and slices may begin at any element.
  virtual void update(const Elements& elements, const Step& step) const = 0;
};

/// The same for a formula of whole parameters: of rows and columns, matrices, norms, blocks. A parameter is
/// updated by the rank that owns it ([Note: whole parameters] in zero/optimizer/whole_optimizer.h), so what
/// an update computes depends on no stage and no number of ranks, and nothing is computed twice. It depends
/// on no other parameter.
///
///   struct SignOfRows final : tessera::zero::WholeUpdateRule {
///     std::string name() const override { return "SignOfRows"; }
///     void update(const Parameter& p, const Step& step) const override {
///       p.weights.sub_(p.gradient.mean(-1, /*keepdim=*/true).sign(), step.lr);
///     }
///   };
///   initialize(model, config, comm,
///              {.whole_optimizer = tessera::zero::make_whole_optimizer(std::make_shared<SignOfRows>())});
class WholeUpdateRule {
 public:
  virtual ~WholeUpdateRule() = default;

  /// By name, which is not "step". Of any shape, and of a type that StateValuesWriter (state_values.h) takes.
  using States = std::map<std::string, at::Tensor>;
  struct Parameter {
    const std::string& name;    ///< of the model
    const at::Tensor& weights;  ///< fp32, of the parameter's shape, to be updated in place
    /// fp32, of the parameter's shape, finite. It is the mean over the global batch, unscaled and clipped; it
    /// may be overwritten.
    const at::Tensor& gradient;
    States& states;  ///< on the parameter's device; empty before the first update, as the last one left them
  };
  using Step = UpdateStep;

  /// As UpdateRule's.
  virtual std::string name() const = 0;
  virtual void update(const Parameter& parameter, const Step& step) const = 0;
};

/// What InitOptions::whole_optimizer takes. For one engine.
std::shared_ptr<WholeOptimizer> make_whole_optimizer(std::shared_ptr<const WholeUpdateRule> rule);

}  // namespace tessera::zero

// WholeParameters: brings the masters and gradients of the parameters that a rank owns together for a
// WholeOptimizer, and takes the new masters back into the shards. See [Note: whole parameters] in
// whole_optimizer.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "zero/optimizer/whole_optimizer.h"
#include "zero/plan/layout.h"
#include "zero/reduce/gradient_reducer.h"
#include "zero/unit/param_unit.h"

namespace tessera::zero {

/// By parameter, the rank that owns it: by its number of elements. -1: it is frozen.
std::vector<int> owners_of_parameters(const Layout& layout);

/// Carries out the updates of a WholeOptimizer. `parameters[i]` is Layout parameter i. Layout and units must
/// outlive it.
class WholeParameters {
 public:
  WholeParameters(const Layout& layout, std::vector<ParamUnit>& units, std::vector<at::Tensor> parameters,
                  comm::CommunicatorPtr comm, std::shared_ptr<WholeOptimizer> optimizer);

  /// Collective. Updates masters and values. `used`: by parameter, what has a gradient. Throws what step()
  /// throws, on the other ranks an Error that names the rank; masters and values are as before then, states
  /// may not be.
  void update(const GradientReducer& gradients, double grad_scale, const std::vector<bool>& used,
              const std::vector<kernels::Hyper>& groups);
  /// Collective. The same around another function than the optimizer's step(), without gradients.
  void apply(const std::function<void()>& function);
  /// Whether the last update() or apply() has thrown because its function did, on some rank: then no rank has
  /// changed a master. Equal on all ranks.
  bool was_refused() const { return refused_; }
  /// The same, and false from now on.
  bool take_refusal() { return std::exchange(refused_, false); }
  const WholeOptimizer& optimizer() const { return *optimizer_; }
  bool owns(int parameter) const { return owners_[parameter] == comm_->rank(); }

 private:
  struct Whole {
    int parameter;
    at::Tensor weights, gradient;  // fp32, of the parameter's shape; gradient undefined: it has none
  };
  std::vector<Whole> gather_weights();
  void gather_gradients(const GradientReducer& gradients, double grad_scale, const std::vector<bool>& used,
                        std::vector<Whole>& owned);
  void run(const std::vector<Whole>& owned, const std::function<void()>& function);
  void scatter(const std::vector<Whole>& owned);

  const Layout& layout_;
  std::vector<ParamUnit>& units_;
  std::vector<at::Tensor> parameters_;
  comm::CommunicatorPtr comm_;
  std::shared_ptr<WholeOptimizer> optimizer_;
  std::vector<int> owners_;  // by parameter
  bool refused_ = false;
};

}  // namespace tessera::zero

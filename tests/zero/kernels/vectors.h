// Vectors and their GradientReducer, with gradients that are known element by element.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "tests/zero/zero_testing.h"
#include "zero/reduce/gradient_hook.h"
#include "zero/reduce/gradient_reducer.h"

namespace tessera::zero::testing {

/// By default: 3 x 64 bytes, so that at worlds 1 and 3 a vector's unit has no padding.
constexpr int64_t kNumel = 48;

struct StageOptions : ReducerOptions {
  int stage = 0;
  std::optional<Mesh> mesh = {};  ///< unset: the communicator's ranks are all there are
};
inline StageOptions at_stage(int stage) { return {{}, stage, {}}; }

/// By vector: its gradient is factor * (1, 2, …, 7, 1, 2, …). 0: the vector is not used.
using Factors = std::vector<double>;

/// What the gradients of all ranks sum to, divided by their number.
Factors mean_over_ranks(int world, const std::function<Factors(int rank)>& factors_of);

/// Puts a function into the hooks of parameters, before an engine's own.
class AtHooks {
 public:
  AtHooks(std::vector<at::Tensor> parameters, const std::function<void(size_t)>& function)
      : parameters_(std::move(parameters)) {
    for (size_t i = 0; i < parameters_.size(); ++i)
      GradientHook::install(this, parameters_[i], [function, i] { function(i); });
  }
  ~AtHooks() {
    for (const at::Tensor& parameter : parameters_) GradientHook::remove(this, parameter);
  }
  AtHooks(const AtHooks&) = delete;

 private:
  std::vector<at::Tensor> parameters_;
};

/// Vectors of fp32, each a unit of its own. Used by one thread; not to be moved.
struct Vectors {
  Vectors(int num, const comm::CommunicatorPtr& comm, const StageOptions& options)
      : Vectors(std::vector<int64_t>(num, kNumel), comm, options) {}
  Vectors(const std::vector<int64_t>& numels, const comm::CommunicatorPtr& comm, const StageOptions& options);
  Vectors(const Vectors&) = delete;

  /// Collective. One micro-step, in which the vectors' gradients come in the order of `order`; empty: the
  /// last vector's first.
  void backward(const Factors& factors, std::vector<int> order = {}, bool first = true, bool boundary = true);

  /// Whether this rank's shard of every unit is what plain tensors say for gradients of `factors`, and
  /// zeros where it is padding. `tolerance` is relative to each element.
  ::testing::AssertionResult hold(const Factors& factors, double tolerance = 0) const;

  /// The most slots in use at the beginning of any hook, or when a reduction was issued.
  int most_slots_in_use() const { return most_slots_in_use_; }
  /// Called at the beginning of every hook.
  std::function<void()> at_hook;

  std::vector<at::Tensor> parameters;
  std::unique_ptr<Layout> layout;
  std::vector<ParamUnit> units;  // for their gradients: the parameters stay where they are
  std::unique_ptr<ReductionOrder> order;
  std::unique_ptr<GradientReducer> reducer;

 private:
  void look_at_slots(bool issuing);

  int rank_, world_;
  int most_slots_in_use_ = 0;
  std::optional<AtHooks> hooks_;
};

}  // namespace tessera::zero::testing

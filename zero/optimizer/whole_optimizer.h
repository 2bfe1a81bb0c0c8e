// WholeOptimizer: an optimizer that updates whole parameters, as an update of matrices (Muon), of rows and
// columns (Adafactor) or any torch.optim.Optimizer does. Beside it, UpdateRule is for formulas of elements.
//
// [Note: whole parameters]
// Each trainable parameter has one owner, a rank (zero/plan/owners.h). The owner keeps the parameter's
// optimizer states, whole; fp32 masters stay in the shards. A step brings the masters and the reduced
// gradients of what a rank owns together, and while WholeOptimizer::step() runs, the model's own tensors of
// these parameters are whole fp32 masters, and their grad() is the unscaled, clipped mean over the global
// batch. Other parameters have no grad(), and so have those that got no gradient on any rank. Then the new
// masters return to the shards. So what an update computes depends on neither stage, world nor units: it is
// the update of the optimizer alone, given the same gradients.
//
// Between steps a rank has no more than its optimizer states; during a step 8 bytes an element of what it
// owns, and one unit's buffer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "zero/kernels/hyper.h"
#include "zero/plan/layout.h"

namespace tessera::zero {

/// A parameter that this rank owns. `tensor` is the model's own.
struct OwnedTensor {
  const ParameterSpec* spec;  ///< lives as long as the engine
  at::Tensor tensor;
};

/// By a parameter's name, the one that it has in a checkpoint: a tied one may have another of its names
/// there.
using NamesInCheckpoint = std::map<std::string, std::string>;

/// Updates the parameters that this rank owns. Used by one thread.
class WholeOptimizer {
 public:
  virtual ~WholeOptimizer() = default;

  /// Stands in checkpoints: one that another optimizer has saved is refused. Equal on all ranks.
  virtual std::string name() const = 0;
  /// Whether rank 0 owns all parameters, because an update of one depends on others. Equal on all ranks.
  virtual bool on_one_rank() const = 0;
  /// Is called once, first: the parameters that this rank owns.
  virtual void own(const std::vector<OwnedTensor>& parameters) = 0;
  /// Updates what this rank owns, which may be nothing, in place. See [Note: whole parameters]. `groups`: the
  /// options of now, by ParameterSpec::group.
  virtual void step(const std::vector<kernels::Hyper>& groups) = 0;
  /// Its own rates by param group, which count where the configuration has no schedule and none are set.
  /// Empty: it has none. Equal on all ranks.
  virtual std::vector<double> rates() const { return {}; }
  /// Of options of its own for the next step, an integer below 2^52 that is equal where they are; 0: it has
  /// none beside the groups of step().
  virtual double digest() const { return 0; }
  /// Collective, after digests have differed: "param group 1 has lr 0.1 on rank 0, but 0.01 on rank 2".
  virtual std::string first_difference() { return {}; }
  /// Bytes of this rank's states.
  virtual int64_t bytes() const = 0;
  /// What bytes() will be once all that this rank owns has been updated; 0: not known before.
  virtual int64_t formula_bytes(const std::vector<kernels::Hyper>&) const { return 0; }
  /// Returns this rank's states for a checkpoint: (n) uint8 on the CPU.
  virtual at::Tensor state() const = 0;
  /// Throws Error where set_state() would not take the states of what this rank owns as another program has
  /// saved them: {"state": {NAME: {…}}, "other": {}} in the form of state_values.h. Changes nothing.
  virtual void check_state_of_another_program(const at::Tensor& saved) const = 0;
  /// Takes what this rank owns out of what all ranks of a checkpoint have saved. `names`: of the parameters
  /// that it is taken of; those of others stay. Null: of all, under their own names. Throws Error.
  virtual void set_state(const std::vector<at::Tensor>& saved, const NamesInCheckpoint* names) = 0;
};

}  // namespace tessera::zero

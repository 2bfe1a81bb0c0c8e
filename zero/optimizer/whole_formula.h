// The formulas of Tessera's own that update whole parameters: Adafactor and AdamW with 8-bit moments. Both
// run on owners: [Note: whole parameters] in whole_optimizer.h.
//
// - Adafactor (N. Shazeer and M. Stern, arXiv:1804.04235) is torch.optim.Adafactor's, with which the bits
//   agree. States: "row_var" and "col_var" of a parameter of two dimensions or more, else "variance".
// - AdamW8bit: zero/kernels/adam_8bit.h. States have bitsandbytes' names: "state1", "state2" (codes) and
//   "absmax1", "absmax2". Small parameters (Hyper::min_8bit_size) and embeddings have fp32 moments, "state1"
//   and "state2": the paper's section 2.3 and bitsandbytes' documents say why. An embedding is told by its
//   name.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>

#include "zero/kernels/hyper.h"
#include "zero/optimizer/update_rule.h"
#include "zero/optimizer/whole_optimizer.h"
#include "zero/plan/layout.h"

namespace tessera::zero {

/// The states of a parameter by name, on its device. Empty before the first update.
using FormulaStates = WholeUpdateRule::States;

/// Whether one of the parameter's names has one of these parts; capital letters count as small ones.
bool has_in_name(const ParameterSpec& parameter, std::initializer_list<const char*> parts);
/// Whether a part of one of its names says that it is an embedding: "embed", "wte", "wpe".
bool is_embedding(const ParameterSpec& parameter);
/// Whether AdamW8bit keeps fp32 moments of it.
bool has_fp32_moments(const kernels::Hyper& hyper, int64_t numel, bool is_embedding);

/// Bytes of the parameter's states after an update, without their step counts.
int64_t formula_state_bytes(kernels::OptimizerKind kind, const kernels::Hyper& hyper,
                            const ParameterSpec& parameter);

/// The same of all parameters that a rank owns, of the rank that has the most; 0 for another optimizer.
/// `groups`: by ParameterSpec::group.
int64_t most_owned_state_bytes(kernels::OptimizerKind kind, const std::vector<kernels::Hyper>& groups,
                               const Layout& layout);

/// Returns what is wrong with AdamW8bit's states of the parameter that were saved, here or by bitsandbytes,
/// or
/// "". Takes away what bitsandbytes adds where it is ours, too: the numbers that the codes stand for, "qmap1"
/// and "qmap2".
std::string problem_of_8bit_states(const ParameterSpec& parameter, FormulaStates& states);

/// One update in place. `weights` and `gradient`: fp32, of the parameter's shape; the gradient may be
/// overwritten. `step` counts from 1.
void adafactor(const at::Tensor& weights, const at::Tensor& gradient, FormulaStates& states,
               const kernels::Hyper& hyper, int64_t step);
void adamw_8bit(const at::Tensor& weights, const at::Tensor& gradient, FormulaStates& states,
                const kernels::Hyper& hyper, int64_t step, bool is_embedding);

/// Updates what a rank owns by the formula of `kind`. `name` stands in checkpoints. Its states in a
/// checkpoint (state_values.h) are {"state": {parameter: {"step": number, …}}}, as in the Python package.
std::shared_ptr<WholeOptimizer> make_whole_formula(kernels::OptimizerKind kind, const std::string& name);

}  // namespace tessera::zero

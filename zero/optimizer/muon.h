// The parts of Muon (K. Jordan et al., https://kellerjordan.github.io/posts/muon) that need whole matrices.
// The formulas are torch.optim.Muon's, with which the bits agree. Other parameters are AdamW's, as in
// DeepSpeed's "Muon"; docs/optimizers.md says what differs from that.
//
// [Note: Muon on shards]
// The momentum is a formula of elements, and is updated on shards like any state. What it proposes is
// gathered in bf16, in which the orthogonalisation computes; the rank that owns a matrix makes it orthogonal,
// once in the world; the result returns in bf16 to the shards, and is applied there. So a step moves 2 bytes
// an element of the units that have matrices each way (at stage 0, and with replicas, an all-reduce brings
// the result, and at stage 0 nothing has to be gathered); states are sharded; and what comes out depends on
// neither stage nor world. A rank has 2 bytes an element of the matrices that it owns meanwhile, and one
// unit's buffer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "zero/kernels/hyper.h"
#include "zero/plan/layout.h"

namespace tessera::zero {

/// Whether Muon updates the parameter in a group that says use_muon; AdamW does otherwise. It does where
/// there are two dimensions or more, unless a part of one of its names says that it is an embedding or an
/// output layer: "embed", "wte", "wpe", "lm_head".
bool is_muon_matrix(const ParameterSpec& parameter);

/// Floating-point operations of one iteration on it, about.
int64_t orthogonalization_cost(const ParameterSpec& parameter);

/// The learning rate's factor for the parameter's shape.
double muon_rate_factor(kernels::AdjustLr adjust, const ParameterSpec& parameter);

/// Returns the parameter's update, bf16 of `proposed`'s shape: a matrix whose singular values are near 1.
/// `proposed`: bf16, of the parameter's shape; three dimensions are a batch of matrices, four and more a
/// matrix of a row for each element of the first dimension.
at::Tensor orthogonalize(const at::Tensor& proposed, int64_t num_iterations);

}  // namespace tessera::zero

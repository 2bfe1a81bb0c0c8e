#include "activations/chunked_loss.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>

#include "core/error.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Which gradients a backward will ask for. Asked before forward(), which runs without autograd.
struct Wanted {
  bool hidden, weight, bias;
};

struct Gradients {
  at::Tensor hidden, weight, bias;  // undefined: not asked for
};

/// Adds what may have fewer bits. The CPU casts it first, which would need as much memory again: by blocks.
void add_up(at::Tensor& sum, const at::Tensor& part) {
  if (part.scalar_type() == sum.scalar_type() || !part.is_cpu()) {
    sum.add_(part);
    return;
  }
  constexpr int64_t kRows = 1024;
  for (int64_t row = 0; row < sum.size(0); row += kRows) {
    const int64_t rows = std::min(kRows, sum.size(0) - row);
    sum.narrow(0, row, rows).add_(part.narrow(0, row, rows));
  }
}

/// Adds the gradients of one chunk, times `factor`; the weights' times `of_weight`, too. probabilities:
/// (rows, vocabulary) fp32, overwritten; counts: (rows), false where the target is ignored.
void add_gradients(Gradients& gradients, at::Tensor probabilities, const at::Tensor& hidden,
                   const at::Tensor& weight, const at::Tensor& target, const at::Tensor& counts,
                   const at::Tensor& factor, double of_weight, int64_t first_row) {
  const at::Tensor column = at::where(counts, target, 0).unsqueeze(1);  // ignore_index may be any number
  probabilities.scatter_add_(1, column, at::full({1, 1}, -1, probabilities.options()).expand_as(column));
  probabilities.mul_(at::where(counts, factor, 0).unsqueeze(1));  // it may be infinite where no row counts
  const at::Tensor low = probabilities.to(hidden.scalar_type());
  if (gradients.hidden.defined())
    gradients.hidden.narrow(0, first_row, hidden.size(0))
        .copy_(at::matmul(low, weight.to(low.scalar_type())));
  if (gradients.weight.defined())
    add_up(gradients.weight, at::matmul(low.t(), of_weight == 1 ? hidden : hidden * of_weight));
  if (gradients.bias.defined()) gradients.bias.add_(probabilities.sum(0));
}

struct ChunkedCrossEntropy : torch::autograd::Function<ChunkedCrossEntropy> {
  /// hidden: (rows, dim), target: (rows)
  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const at::Tensor& target,
                            int64_t chunk_rows, int64_t ignore_index, const Wanted& wants) {
    const bool has_bias = bias.has_value() && bias->defined();
    Gradients gradients;
    if (wants.hidden) gradients.hidden = at::empty_like(hidden);
    const auto zeros = [](const at::Tensor& like) {  // to add up the chunks in: fp32 at least
      return at::zeros(like.sizes(), like.options().dtype(at::promoteTypes(like.scalar_type(), at::kFloat)));
    };
    if (wants.weight) gradients.weight = zeros(weight);
    if (has_bias && wants.bias) gradients.bias = zeros(*bias);
    const at::Tensor counts = target != ignore_index;
    const at::Tensor scale = 1 / counts.sum().to(at::kFloat);
    at::Tensor sum = at::zeros({}, scale.options()), factor = scale, rest = at::ones_like(scale);
    bool in_fp16 = false;  // there backward may raise what fp16 has not
    double of_weight = 1;
    for (int64_t row = 0; row < hidden.size(0); row += chunk_rows) {
      const int64_t rows = std::min(chunk_rows, hidden.size(0) - row);
      const at::Tensor part = hidden.narrow(0, row, rows), wanted = target.narrow(0, row, rows);
      const at::Tensor logits = at::linear(part, weight, has_bias ? bias : std::nullopt);
      if (row == 0 && logits.scalar_type() == at::kHalf) {
        // fp16 would lose what is divided by all rows. So backward does that, with the loss scale. The sum
        // over a chunk stays within what fp16 has, and small probabilities keep their bits.
        in_fp16 = true;
        factor = at::ones_like(scale);
        rest = at::where(counts.any(), scale, 0);
        of_weight = std::min(1.0, 64.0 / static_cast<double>(rows));
      }
      const at::Tensor log_probabilities = at::log_softmax(logits.to(at::kFloat), -1);
      sum = sum + at::nll_loss(log_probabilities, wanted, {}, at::Reduction::Sum, ignore_index);
      if (gradients.hidden.defined() || gradients.weight.defined() || gradients.bias.defined())
        add_gradients(gradients, log_probabilities.exp(), part, weight, wanted, counts.narrow(0, row, rows),
                      factor, of_weight, row);
    }
    if (in_fp16 && gradients.weight.defined()) gradients.weight.div_(of_weight);
    if (!in_fp16 && gradients.weight.defined()) gradients.weight = gradients.weight.to(weight.scalar_type());
    if (!in_fp16 && gradients.bias.defined()) gradients.bias = gradients.bias.to(bias->scalar_type());
    context->save_for_backward({gradients.hidden, gradients.weight, gradients.bias, rest});
    return sum * scale;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradient) {
    variable_list gradients = context->get_saved_variables();
    const at::Tensor factor = gradient[0] * gradients[3];
    gradients.resize(3);
    for (at::Tensor& saved : gradients) {
      if (!saved.defined()) continue;
      // A loss scale may be more than fp16 has. Autograd casts the result to the type of the argument.
      saved = saved.scalar_type() == at::kHalf ? saved.to(at::kFloat).mul_(factor)
                                               : saved * factor.to(saved.scalar_type());
    }
    gradients.resize(7);
    return gradients;
  }
};

}  // namespace

at::Tensor chunked_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
                                 const at::Tensor& target, const ChunkedLossOptions& options) {
  if (hidden.dim() < 1 || weight.dim() != 2 || hidden.size(-1) != weight.size(1) ||
      target.sizes() != hidden.sizes().slice(0, hidden.dim() - 1))
    throw Error("chunked_cross_entropy(): hidden ", hidden.sizes(), ", weight ", weight.sizes(), ", target ",
                target.sizes(), "; expected (…, dim), (vocabulary, dim), (…)");
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0)))
    throw Error("chunked_cross_entropy(): bias ", bias.sizes(), ", weight ", weight.sizes(),
                "; expected (vocabulary), (vocabulary, dim)");
  if (!hidden.is_floating_point() || !weight.is_floating_point() || target.scalar_type() != at::kLong)
    throw Error("chunked_cross_entropy(): hidden is ", hidden.scalar_type(), ", weight ",
                weight.scalar_type(), ", target ", target.scalar_type(),
                "; expected floating types, and Long");
  if (options.chunk_rows < 1)
    throw Error("chunked_cross_entropy(): chunk_rows is ", options.chunk_rows, "; expected at least 1");
  const bool grad = at::GradMode::is_enabled();
  const Wanted wants{grad && hidden.requires_grad(), grad && weight.requires_grad(),
                     grad && bias.defined() && bias.requires_grad()};
  return ChunkedCrossEntropy::apply(hidden.reshape({-1, hidden.size(-1)}), weight,
                                    bias.defined() ? std::optional(bias) : std::nullopt, target.reshape(-1),
                                    options.chunk_rows, options.ignore_index, wants);
}

}  // namespace tessera

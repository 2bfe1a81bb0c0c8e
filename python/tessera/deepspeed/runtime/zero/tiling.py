"""`deepspeed.zero.TiledLinear`: a linear layer of several smaller ones."""
from itertools import accumulate
from typing import Any

import torch
from torch import nn


class TiledLinear(nn.Module):
    """y = x W^T + b, with W in `out_splits` times `in_splits` parts of nearly equal size, each an own parameter.

    At stage 3 only the parts that are computed with need to be gathered, where `zero_optimization.unit_numel` is no larger than one.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool
    in_splits, out_splits : int
        From 1, and no more than there are features.
    input_is_already_split : bool
        True: the input is a list, or tuple, of `in_splits` tensors.
    combine_out_splits : bool
        False: the output is a list of `out_splits` tensors.
    linear_cls : type
        Of the parts: `linear_cls(in, out, bias=…, **kwargs)`.
    init_linear : torch.nn.Linear, optional
        Its values are copied.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, in_splits: int = 1, out_splits: int = 1,
                 input_is_already_split: bool = False, combine_out_splits: bool = True, linear_cls: type = nn.Linear,
                 init_linear: nn.Linear | None = None, **kwargs: Any) -> None:
        super().__init__()
        for name, splits, features in (("in_splits", in_splits, in_features), ("out_splits", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(f"TiledLinear: {name} is {splits}; expected 1 to {features}, the number of features")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_sizes, self.out_sizes = _sizes(in_features, in_splits), _sizes(out_features, out_splits)
        # Part i has features in_parts[i] to in_parts[i + 1].
        self.in_parts, self.out_parts = ([0, *accumulate(sizes)] for sizes in (self.in_sizes, self.out_sizes))
        self.linears = nn.ModuleList(
            nn.ModuleList(linear_cls(columns, rows, bias=bias and i == in_splits - 1, **kwargs) for i, columns in enumerate(self.in_sizes))
            for rows in self.out_sizes)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """See the class."""
        if self.input_is_already_split:
            if len(input_) != self.in_splits:
                raise RuntimeError(f"TiledLinear: the input has {len(input_)} parts; expected {self.in_splits}")
            parts = input_
        else:
            parts = torch.split(input_, self.in_sizes, dim=-1)
        outputs = [self._sum([linear(part) for linear, part in zip(row, parts)]) for row in self.linears]
        return self._combined(outputs) if self.combine_out_splits else outputs

    def copy_params_from(self, other: nn.Linear) -> None:
        """Take the values of a linear layer of the same size."""
        if not hasattr(other, "weight") or tuple(other.weight.shape) != (self.out_features, self.in_features):
            raise RuntimeError(f"TiledLinear: the weight to copy is {list(getattr(getattr(other, 'weight', None), 'shape', []))}; expected "
                               f"[{self.out_features}, {self.in_features}]")
        with torch.no_grad():
            for row, weights in zip(self.linears, other.weight.split(self.out_sizes)):
                for linear, weight in zip(row, weights.split(self.in_sizes, dim=1)):
                    linear.weight.copy_(weight)
            if self.use_bias and other.bias is not None:
                for row, bias in zip(self.linears, other.bias.split(self.out_sizes)):
                    row[-1].bias.copy_(bias)

    def _sum(self, results):
        return sum(results[1:], results[0])

    def _combined(self, outputs):
        return torch.cat(outputs, dim=-1)


class TiledLinearReturnBias(TiledLinear):
    """As TiledLinear, of layers that return (output, bias), as Megatron's do; so does this one, whose bias is None without `bias`."""

    def _sum(self, results):
        outputs = [output for output, _ in results]
        return sum(outputs[1:], outputs[0]), results[-1][1]

    def _combined(self, outputs):
        biases = [bias for _, bias in outputs if bias is not None]
        return torch.cat([output for output, _ in outputs], dim=-1), torch.cat(biases, dim=-1) if biases else None


def _sizes(total, parts):
    """The larger parts come first."""
    return [total // parts + (i < total % parts) for i in range(parts)]

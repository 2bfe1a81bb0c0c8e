"""`deepspeed.ops.lamb`: LAMB (Y. You et al., arXiv 1904.00962)."""
from collections.abc import Iterable
from typing import Any

from tessera.deepspeed.ops.rules import RuleOptimizer, moments


class FusedLamb(RuleOptimizer):
    """Adam's update of a parameter, with decoupled weight decay, times the quotient of the parameter's norm and the update's, which is held
    between `min_coeff` and `max_coeff`, and is 1 where one of them is 0.

    `amsgrad`, `eps_inside_sqrt` and `max_grad_norm` are refused.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, eps_inside_sqrt: bool = False, weight_decay: float = 0.0, max_grad_norm: float = 0.0,
                 max_coeff: float = 10.0, min_coeff: float = 0.01, amsgrad: bool = False) -> None:
        if eps_inside_sqrt or max_grad_norm:
            raise ValueError("FusedLamb: eps_inside_sqrt and max_grad_norm are not built in; expected False and 0, and gradient_clipping in the "
                             "configuration")
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                  "max_grad_norm": max_grad_norm, "max_coeff": max_coeff, "min_coeff": min_coeff}, amsgrad)
        self.eps_mode = 1  # eps is added to the square root, in the terms of DeepSpeed's kernel

    def update(self, parameter, gradient, state, group):
        mean, square = moments(parameter, gradient, state, group)
        update = mean / square.sqrt().add_(group["eps"])
        if group["weight_decay"] != 0:
            update.add_(parameter, alpha=group["weight_decay"])
        size, update_size = float(parameter.norm()), float(update.norm())
        ratio = min(max(size / update_size, group["min_coeff"]), group["max_coeff"]) if size != 0 and update_size != 0 else 1.0
        parameter.add_(update, alpha=-group["lr"] * ratio)

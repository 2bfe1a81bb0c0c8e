"""`deepspeed.ops.lion`: Lion (X. Chen et al., arXiv 2302.06675)."""
from collections.abc import Iterable
from typing import Any

from tessera.deepspeed.ops.rules import RuleOptimizer, zeros_in


class _Lion(RuleOptimizer):
    def update(self, parameter, gradient, state, group):
        beta1, beta2 = group["betas"]
        mean = zeros_in(state, "exp_avg", parameter)
        if group["weight_decay"] != 0:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(mean.lerp(gradient, 1 - beta1).sign_(), alpha=-group["lr"])
        mean.lerp_(gradient, 1 - beta2)


class FusedLion(_Lion):
    """Lion, with DeepSpeed's arguments."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0,
                 set_grad_none: bool = True) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.set_grad_none = set_grad_none


class DeepSpeedCPULion(_Lion):
    """Lion, with DeepSpeed's arguments."""

    def __init__(self, model_params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0,
                 fp32_optimizer_states: bool = True) -> None:
        super().__init__(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, fp32_optimizer_states=fp32_optimizer_states)
        self.fp32_optimizer_states = fp32_optimizer_states

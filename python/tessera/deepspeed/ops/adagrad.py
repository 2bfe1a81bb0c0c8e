"""`deepspeed.ops.adagrad`: Adagrad (J. Duchi, E. Hazan and Y. Singer, JMLR 12, 2011)."""
from collections.abc import Iterable
from typing import Any

from tessera.deepspeed.ops.rules import RuleOptimizer, zeros_in


class DeepSpeedCPUAdagrad(RuleOptimizer):
    """Adagrad with an L2 penalty. `amsgrad` is refused."""

    def __init__(self, model_params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, amsgrad: bool = False,
                 fp32_optimizer_states: bool = True) -> None:
        super().__init__(model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}, amsgrad, fp32_optimizer_states)
        self.fp32_optimizer_states = fp32_optimizer_states

    def update(self, parameter, gradient, state, group):
        if group["weight_decay"] != 0:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        square = zeros_in(state, "exp_avg_sq", parameter)
        square.addcmul_(gradient, gradient)
        parameter.addcdiv_(gradient, square.sqrt().add_(group["eps"]), value=-group["lr"])

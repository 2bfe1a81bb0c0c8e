"""`deepspeed.ops.adam`: Adam and AdamW (D. Kingma and J. Ba, arXiv 1412.6980; I. Loshchilov and F. Hutter, arXiv 1711.05101)."""
from collections.abc import Iterable
from typing import Any

from tessera.deepspeed.ops.rules import RuleOptimizer, moments


class _Adam(RuleOptimizer):
    adam_w_mode: int | bool

    def update(self, parameter, gradient, state, group):
        if group["weight_decay"] != 0:
            if self.adam_w_mode:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            else:
                gradient = gradient.add(parameter, alpha=group["weight_decay"])
        mean, square = moments(parameter, gradient, state, group)
        parameter.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-group["lr"])


class FusedAdam(_Adam):
    """AdamW, or Adam with an L2 penalty where `adam_w_mode` is False. `amsgrad` is refused, as in DeepSpeed."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False,
                 set_grad_none: bool = True) -> None:
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}, amsgrad)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none


class DeepSpeedCPUAdam(_Adam):
    """AdamW, or Adam with an L2 penalty where `adamw_mode` is False. `amsgrad`, and states that are not fp32, are
    refused."""

    def __init__(self, model_params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False, adamw_mode: bool = True,
                 fp32_optimizer_states: bool = True) -> None:
        super().__init__(model_params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
                                        "amsgrad": amsgrad}, amsgrad, fp32_optimizer_states)
        self.adam_w_mode = self.adamw_mode = adamw_mode
        self.fp32_optimizer_states = fp32_optimizer_states

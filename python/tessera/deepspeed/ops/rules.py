"""What the optimizers of `deepspeed.ops` have in common: a step that goes through the param groups."""
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tessera import optim
from tessera.deepspeed.configured import ConfiguredType


class RuleOptimizer(torch.optim.Optimizer, metaclass=ConfiguredType):
    """An optimizer whose `update(parameter, gradient, state, group)` is the formula for one parameter. A parameter in 16 bits is updated in
    an fp32 copy, and so are its states.

    `state["step"]` is an int, the number of updates with this one. `amsgrad` and 16-bit states are refused.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], amsgrad: bool = False, fp32_optimizer_states: bool = True) -> None:
        if amsgrad:
            raise RuntimeError(f"{type(self).__name__}(amsgrad=True) is not supported, as in DeepSpeed; expected False")
        if not fp32_optimizer_states:
            raise ValueError(f"{type(self).__name__}(fp32_optimizer_states=False): states are fp32 here; expected True")
        super().__init__(params, defaults)

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Change a parameter and its state in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter that has a gradient. Returns what `closure` returns, which is called before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError(f"{type(self).__name__}: a gradient is sparse; expected dense ones")
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                value = parameter.to(_dtype_of_states(parameter))
                self.update(value, parameter.grad.to(value.dtype), state, group)
                if value is not parameter:
                    parameter.copy_(value)
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Of the gradients. Without an argument as `set_grad_none` of the constructor says; those without it free them."""
        super().zero_grad(getattr(self, "set_grad_none", True) if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. States of a parameter in 16 bits are fp32 here, too."""
        optim.load_with_dtypes(super().load_state_dict, self, state_dict, _with_dtype)


def _dtype_of_states(parameter):
    return torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype


def _with_dtype(parameter, state, _):
    return {key: value.to(_dtype_of_states(parameter)) if key != "step" and isinstance(value, torch.Tensor) else value for key, value in state.items()}


def zeros_in(state: dict[str, Any], name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A state of the parameter's shape and dtype, of zeros at first."""
    if name not in state:
        state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state[name]


def moments(parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Adam's moments after this gradient: of a step without bias correction as they are, else corrected copies."""
    beta1, beta2 = group["betas"]
    mean, square = zeros_in(state, "exp_avg", parameter), zeros_in(state, "exp_avg_sq", parameter)
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    if not group["bias_correction"]:
        return mean, square
    return mean / (1 - beta1 ** state["step"]), square / (1 - beta2 ** state["step"])

"""Optimizers that torch.optim lacks, and the configuration's that run on whole parameters.

`AdamW8bit` is a `torch.optim.Optimizer` like any other: it works without an engine, too.
"""
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tessera import _engine, arguments
from tessera.errors import ConfigError, Error

_FP32_EPS = torch.finfo(torch.float32).eps
WHOLE = ("Adafactor", "AdamW8bit")  # the configuration's types that update whole parameters
_STATES_OF_BITSANDBYTES = "__bnb_optimizer_quant_state__"


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments have 8 bits an element, and a scale for each 256: 2.03 bytes an element, not 8. On the CPU, and on CUDA where
    Tessera was built for it.

    T. Dettmers et al., arXiv:2110.02861; the formulas are in `zero/kernels/adam_8bit.h`. Arguments and states have the names of
    bitsandbytes' AdamW8bit.

    Parameters
    ----------
    params : iterable of Parameter, of (name, Parameter), or of dict
        fp32, dense. Given with names, as by `model.named_parameters()`, embeddings ("embed", "wte", "wpe" in a name) keep fp32 moments.
    lr, betas, eps, weight_decay : float, (float, float), float, float
        As torch.optim.AdamW's. Of a group, too.
    optim_bits : int
        32: fp32 moments. Of a group, too.
    min_8bit_size : int
        A parameter with fewer elements has fp32 moments.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, optim_bits: int = 8, min_8bit_size: int = 4096) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "optim_bits": optim_bits,
                    "min_8bit_size": min_8bit_size}
        super().__init__(params, defaults)
        for group in self.param_groups:
            _check(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, of bitsandbytes' AdamW8bit, too. Raises Error for states of another one."""
        load_with_dtypes(super().load_state_dict, self, state_dict, lambda p, state, where: taken_states(self, p.shape, state, where))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Raises Error for one that is not fp32 and dense."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _check(group)
            names = group.get("param_names") or [""] * len(group["params"])
            for name, p in zip(names, group["params"]):
                if p.grad is not None:
                    self._update(name, p, group)
        return loss

    def _update(self, name, p, group):
        for what, tensor in (("parameter", p), ("gradient", p.grad)):
            if tensor.dtype != torch.float32 or not arguments.is_dense(tensor):
                raise ConfigError(f"AdamW8bit: the {what} {name or list(p.shape)} is {arguments.described(tensor)}; expected a dense fp32 one (an "
                                  "engine gives it fp32 masters)")
        state = self.state[p]
        step = state.get("step", torch.zeros((), dtype=torch.float32, device="cpu")) + 1
        moments = {key: value for key, value in state.items() if key != "step"}
        weights = p if p.is_contiguous() else p.contiguous()
        updated = _engine.adamw_8bit(weights, p.grad.contiguous(), moments, int(step), name, float(group["lr"]), *map(float, group["betas"]),
                                     float(group["eps"]), float(group["weight_decay"]), group["optim_bits"], group["min_8bit_size"])
        if weights is not p:
            p.copy_(weights)
        self.state[p] = {**updated, "step": step}


def _check(group):
    beta1, beta2 = group["betas"]
    for what, value, is_right, expected in (("lr", group["lr"], group["lr"] >= 0, "a number from 0"),
                                            ("betas", group["betas"], 0 <= beta1 < 1 and 0 <= beta2 < 1, "two numbers from 0 to below 1"),
                                            ("eps", group["eps"], group["eps"] >= 0, "a number from 0"),
                                            ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0, "a number from 0"),
                                            ("optim_bits", group["optim_bits"], group["optim_bits"] in (8, 32), "8 or 32"),
                                            ("min_8bit_size", group["min_8bit_size"], group["min_8bit_size"] >= 0, "a number from 0")):
        if not is_right:
            raise ConfigError(f"AdamW8bit: {what} is {value}; expected {expected}")


def opened_states(state: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The states of a parameter, of which bitsandbytes' optimizers save some in a dict of their own. Raises Error for one that is there twice."""
    inner = state.get(_STATES_OF_BITSANDBYTES)
    if not isinstance(inner, Mapping):
        return dict(state)
    outer = {key: value for key, value in state.items() if key != _STATES_OF_BITSANDBYTES}
    if twice := outer.keys() & inner.keys():
        raise Error(f"{where}: {', '.join(sorted(twice))} is there twice, in {_STATES_OF_BITSANDBYTES} too; expected it once")
    return {**outer, **inner}


def taken_states(optimizer: torch.optim.Optimizer, shape: Sequence[int], state: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The states of a parameter of this shape that an optimizer of the class has saved, here or elsewhere.

    Of AdamW8bit, what is not as its own is an Error that begins with `where`. Other classes take what they are given.
    """
    state = opened_states(state, where)
    if not isinstance(optimizer, AdamW8bit) or not state:
        return state
    others = sorted(key for key, value in state.items() if key != "step" and not isinstance(value, torch.Tensor) and value is not None)
    found, problem = _engine.take_8bit_states(list(shape), {key: value for key, value in state.items() if key != "step" and isinstance(value, torch.Tensor)})
    if others:
        problem = f"found the state {others[0]}, which this optimizer does not have"
    if not problem and "step" not in state:
        problem = "step is missing; expected the number of updates"
    if problem:
        raise Error(f"{where}: {problem}")
    return {**found, "step": torch.as_tensor(state["step"], dtype=torch.float32, device="cpu")}


def load_with_dtypes(load: Callable[[dict[str, Any]], None], optimizer: torch.optim.Optimizer, state_dict: dict[str, Any],
                     taken: Callable[[torch.Tensor, Mapping[str, Any], str], dict[str, Any]]) -> None:
    """Call torch's load_state_dict, which gives states their parameter's dtype, for an optimizer whose states have others.

    Parameters
    ----------
    load : callable
        torch's, of this optimizer.
    taken : callable
        What the optimizer is to have of a parameter, made of the states that were saved of it and, for errors, of where those are.
    """
    states = {}

    def take(_, given):  # after the hooks of the users, which may change what is loaded
        ours, theirs = ([one for group in groups for one in group["params"]] for groups in (optimizer.param_groups, given["param_groups"]))
        saved = {index: parameter for parameter, index in zip(ours, theirs) if index in given["state"]}
        states.update((parameter, taken(parameter, given["state"][index], f"state of parameter {index}")) for index, parameter in saved.items())
        return {**given, "state": {**given["state"], **{index: states[parameter] for index, parameter in saved.items()}}}

    def put_back(_):
        for parameter, state in states.items():
            loaded = optimizer.state[parameter]
            loaded.update((key, value.to(loaded[key].device, copy=True)) for key, value in state.items()
                          if isinstance(value, torch.Tensor) and value.dtype != loaded[key].dtype)

    hooks = optimizer.register_load_state_dict_pre_hook(take), optimizer.register_load_state_dict_post_hook(put_back, prepend=True)
    try:
        load(state_dict)
    finally:
        for hook in hooks:
            hook.remove()


def of_configuration(type_: str, groups: list[tuple[dict[str, Any], list[tuple[str, torch.nn.Parameter]]]]) -> torch.optim.Optimizer:
    """The configuration's optimizer of a type in WHOLE.

    Parameters
    ----------
    type_ : str
        `optimizer.type`.
    groups : list of (dict, list of (str, Parameter))
        `optimizer.params` of each param group, and its trainable parameters; a group may have none.
    """
    make = AdamW8bit if type_ == "AdamW8bit" else torch.optim.Adafactor
    optimizer = make([{"params": named, **_of_class(type_, options)} for options, named in groups if named], **_of_class(type_, groups[0][0]))
    for i, (options, named) in enumerate(groups):
        if not named:  # torch has no names for an empty group, and wants all groups to have some
            optimizer.param_groups.insert(i, {**optimizer.defaults, **_of_class(type_, options), "params": [], "param_names": []})
    return optimizer


def _of_class(type_, options):
    options = dict(options)
    if type_ == "Adafactor":
        eps1, eps2 = options["eps"]
        options["eps"] = (None if eps1 == _FP32_EPS else eps1, eps2)  # torch's None is the epsilon of the parameter's dtype, here fp32's
    else:
        options["betas"] = tuple(options["betas"])
    return options

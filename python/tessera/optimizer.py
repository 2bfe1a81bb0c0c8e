"""Optimizers of torch as configurations, and the optimizer that `initialize` returns.

The engine updates its shards with formulas of its own. A torch optimizer says which formula and with which hyper-parameters; its
`step` is never called. What it is translated to is read once, but its param groups stay alive: what a scheduler or the script
writes into them (`group["lr"] = ...`) counts from the next step on.
"""
import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tessera.errors import ConfigError

# By class name: the configuration's type, the hyper-parameters in torch's names, and options that have to have these values.
_ADAM = (("lr", "betas", "eps", "weight_decay"), {"amsgrad": False, "maximize": False})
_KINDS = {
    "AdamW": ("AdamW", *_ADAM),
    "Adam": ("Adam", *_ADAM),
    "FusedAdam": ("AdamW", ("lr", "betas", "eps", "weight_decay", "bias_correction"), {"amsgrad": False}),
    "DeepSpeedCPUAdam": ("AdamW", ("lr", "betas", "eps", "weight_decay", "bias_correction"), {"amsgrad": False}),
    "SGD": ("SGD", ("lr", "momentum", "dampening", "weight_decay", "nesterov"), {"maximize": False}),
    "Adagrad": ("Adagrad", ("lr", "lr_decay", "eps", "weight_decay"), {"initial_accumulator_value": 0, "maximize": False}),
    "Lion": ("Lion", ("lr", "betas", "weight_decay"), {"maximize": False}),
    "FusedLion": ("Lion", ("lr", "betas", "weight_decay"), {}),
    "Lamb": ("LAMB", ("lr", "betas", "eps", "weight_decay"), {"maximize": False}),
    "FusedLamb": ("LAMB", ("lr", "betas", "eps", "weight_decay", "bias_correction", "max_coeff", "min_coeff"), {"amsgrad": False}),
}
_KEYS_OF_TYPE = {
    "AdamW": ("lr", "betas", "eps", "weight_decay", "bias_correction"),
    "Adam": ("lr", "betas", "eps", "weight_decay", "bias_correction"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "Adagrad": ("lr", "lr_decay", "eps", "weight_decay"),
    "Lion": ("lr", "betas", "weight_decay"),
    "LAMB": ("lr", "betas", "eps", "weight_decay", "bias_correction", "max_coeff", "min_coeff"),
}


def section_of(optimizer: torch.optim.Optimizer, named_parameters: list[tuple[str, torch.nn.Parameter]]) -> dict[str, Any]:
    """A torch optimizer as the section `optimizer` of a configuration.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        AdamW, Adam, SGD or Adagrad of torch.optim, or a Lion or LAMB by that name. Without state: it has taken no step.
    named_parameters : list of (str, Parameter)
        The model's, by which the groups' tensors are named.

    Raises
    ------
    ConfigError
        Another class; an option that the formulas here lack; a tensor that is not the model's; a trainable parameter in no group.
    """
    kind = type(optimizer).__name__
    if kind not in _KINDS or not _is_known_class(optimizer):
        raise ConfigError(f"{_full_name(optimizer)} is not an optimizer Tessera has; expected AdamW, Adam, SGD or Adagrad of "
                          "torch.optim, Lion or LAMB, or the section \"optimizer\" of the configuration")
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ConfigError("the optimizer has taken steps, and its state would be lost; expected one that has not "
                          "(load_checkpoint() brings an engine's state)")
    config_type, keys, required = _KINDS[kind]
    groups = [(_names_of(group["params"], named_parameters), _values(group, keys, required, optimizer))
              for group in optimizer.param_groups if len(group["params"]) > 0]
    _check_complete(groups, named_parameters)
    params = dict(groups[0][1])
    section = {"type": config_type, "params": params, "param_groups": [_changes(params, *group) for group in groups[1:]]}
    if config_type == "Adam":
        params["adam_w_mode"] = False
    return section


def groups_of(model_parameters: Iterable[Any], named_parameters: list[tuple[str, torch.nn.Parameter]]) -> list[dict[str, Any]]:
    """`model_parameters` of `initialize` as `optimizer.param_groups`: [] for plain parameters, else a section for each dict.

    Raises
    ------
    ConfigError
        As `section_of`.
    """
    given = list(model_parameters)
    if not given or not isinstance(given[0], dict):
        _check_complete([(_names_of([pair[1] if isinstance(pair, tuple) else pair for pair in given], named_parameters), {})],
                        named_parameters)
        return []
    groups = []
    for group in given:
        values = {key: _plain(value) for key, value in group.items() if key not in ("params", "name", "param_names")}
        groups.append((_names_of(group["params"], named_parameters), values))
    _check_complete(groups, named_parameters)
    return [{"match": names, **values} for names, values in groups if names and values]


def _is_known_class(optimizer):
    """Whether the class is the one that its name says: torch's, or a library's Lion or LAMB."""
    name = type(optimizer).__name__
    torchs = getattr(torch.optim, name, None)
    return type(optimizer) is torchs if torchs is not None else True


def _full_name(optimizer):
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _values(group, keys, required, optimizer):
    for option, expected in required.items():
        if group.get(option, expected) not in (expected, None):
            raise ConfigError(f"{_full_name(optimizer)}: {option}={group[option]} is not built in; expected {expected}")
    return {key: _plain(group[key]) for key in keys if key in group}


def _changes(params, names, values):
    return {"match": names, **{key: value for key, value in values.items() if value != params.get(key)}}


def _names_of(tensors, named_parameters):
    names = {}
    for name, parameter in named_parameters:  # a tied one: the first name
        names.setdefault(id(parameter), name)
    found = []
    for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        if id(tensor) not in names:
            raise ConfigError(f"the optimizer has a tensor of shape {list(tensor.shape)} that is not a parameter of the model")
        found.append(names[id(tensor)])
    return found


def _check_complete(groups, named_parameters):
    grouped = {name for names, _ in groups for name in names}
    seen = set()
    for name, parameter in named_parameters:
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if parameter.requires_grad and name not in grouped:
            raise ConfigError(f"parameter {name} is trainable and in no param group of the optimizer: add it to one, or freeze it "
                              "with requires_grad_(False)")


class Optimizer(torch.optim.Optimizer):
    """The optimizer of an engine, with the interface of torch.optim: `param_groups` and learning rates.

    Moments and master weights are in the engine's shards. Values written into `param_groups` count from the next step on;
    where the configuration has a schedule, that sets the rates.
    """

    def __init__(self, engine: Any, client: torch.optim.Optimizer | None = None) -> None:
        self._engine = weakref.ref(engine)
        self._scheduled = bool(engine.config.get("scheduler", {}).get("type"))
        kind = engine.config["optimizer"]["type"]
        self._keys = _KEYS_OF_TYPE[kind]
        groups = engine._engine.param_groups()
        if client is not None:
            self._indices = list(range(len(groups)))
            super().__init__([group for group in client.param_groups if group["params"]], {})
            self.param_groups = client.param_groups
        else:
            parameters = dict(engine.named_tensors)
            self._indices = [i for i, group in enumerate(groups) if group.parameters]
            nothing = [{"params": []}]  # all are frozen: a model that is evaluated only
            super().__init__([{"params": [parameters[name] for name in groups[i].parameters], **self._shown(groups[i].hyper)}
                              for i in self._indices] or nothing, {})
        self._client = client
        self._pushed = self.values()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As `engine.step()`."""
        loss = closure() if closure is not None else None
        self._engine().step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `engine.zero_grad()`."""
        self._engine().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The param groups. The states are in the engine's shards: `engine.save_checkpoint` saves them."""
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the hyper-parameters of the param groups. The states come with `engine.load_checkpoint`."""
        self.load_values([{key: value for key, value in group.items() if key != "params"}
                          for group in state_dict["param_groups"] if group["params"]])

    def values(self) -> list[dict[str, Any]]:
        """The hyper-parameters of each param group, as JSON has them."""
        return [self._read(group) for group in self._groups()]

    def load_values(self, values: list[dict[str, Any]]) -> None:
        """Writes what `values` has returned into the groups, if they are as many."""
        if len(values) == len(self._groups()):
            for group, saved in zip(self._groups(), values):
                group.update(saved)

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped."""
        engine = self._engine()
        return engine.global_steps > 0 and not engine.was_step_applied()

    def _groups(self):
        return [group for group in self.param_groups if group["params"]]

    def _shown(self, hyper):
        values = {key: getattr(hyper, key) for key in self._keys if key != "betas"}
        return {**values, "betas": (hyper.beta1, hyper.beta2)} if "betas" in self._keys else values

    def _read(self, group):
        return {key: _plain(group[key]) for key in self._keys if key in group}

    def push(self) -> None:
        """Give the engine what has been written into the param groups."""
        now = self.values()
        if now == self._pushed:
            return
        engine = self._engine()._engine
        if not self._scheduled and [values["lr"] for values in now] != [values["lr"] for values in self._pushed]:
            rates = engine.learning_rates
            for index, values in zip(self._indices, now):
                rates[index] = values["lr"]
            engine.set_learning_rates(rates)
        hypers = engine.param_groups()
        for index, values, before in zip(self._indices, now, self._pushed):
            if values == before:
                continue
            hyper = hypers[index].hyper
            for key, value in values.items():
                if key == "betas":
                    hyper.beta1, hyper.beta2 = value
                else:
                    setattr(hyper, key, value)
            engine.set_hyper(index, hyper)
        self._pushed = now

    def pull(self) -> None:
        """Show the rates that the configured schedule has for the next step."""
        if not self._scheduled:
            return
        rates = self._engine()._engine.learning_rates
        for index, group, pushed in zip(self._indices, self._groups(), self._pushed):
            group["lr"] = pushed["lr"] = rates[index]

    def stepped(self) -> None:
        """A step was taken: for torch's schedulers, which warn when they run before the optimizer."""
        for optimizer in (self, self._client):
            if optimizer is not None:
                optimizer._opt_called = True


def to_override(path: str, value: Any) -> str:
    """A key of the configuration with its value, as `--set` takes it."""
    return f"{path}={json.dumps(value)}"

"""What the options of an optimizer's class mean: which formula the engine updates with, and with which hyper-parameters.

A table for each class says of every option that the class has what becomes of it. An option, or a value, that no table has is
refused by name, so that nothing trains by another rule than the one that was asked for.
"""
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tessera import arguments
from tessera.errors import ConfigError

_MISSING = object()
_NO_EFFECT = object()  # on any number
_HYPER = object()  # a hyper-parameter of the formula, of the same name
_DECOUPLES = object()  # whether the weight decay is decoupled: the configuration's type is AdamW then, else Adam


class NotBuiltIn(ConfigError):
    """No formula here does what an optimizer, or one of its options, asks for."""


@dataclass(frozen=True)
class _Only:
    """An option that has to have one of these values."""

    values: tuple
    advice: str = ""


@dataclass(frozen=True)
class _Class:
    """A class of optimizers: its formula, as far as no option chooses it, and its options."""

    type: str
    options: Mapping[str, Any]
    check: Callable[[dict[str, Any]], None] | None = None  # of the values
    package: str = "torch.optim"  # whose class it has to be


def _options(hypers, *, only=(), chooses=None, no_effect=()):
    return {**dict.fromkeys(hypers.split(), _HYPER), **dict.fromkeys(no_effect, _NO_EFFECT), **dict(only), **({chooses: _DECOUPLES} if chooses else {})}


_OFF = _Only((False, None, 0))
_SPEED = ("foreach", "fused", "capturable", "differentiable")
_ADAM = "lr betas eps weight_decay"
_FLAGS = ("amsgrad", "maximize", "centered", "nesterov", "bias_correction", "use_muon")  # in torch's classes also 0, 1 and None


def _adam(own_type):
    """torch.optim's Adam and AdamW."""
    return _Class(own_type, _options(_ADAM + " amsgrad maximize", no_effect=_SPEED, chooses="decoupled_weight_decay"))


def _of_deepspeed(own_type, hypers, no_effect=(), **options):
    """The stand-in's; torch's load_state_dict() adds "differentiable"."""
    return _Class(own_type, _options(hypers, no_effect=(*no_effect, "differentiable"), **options), package="tessera.deepspeed.ops")


def _within(values):
    """What is outside of the formula's ranges runs as it is."""
    for option in ("momentum", "alpha"):
        if not 0 <= values.get(option, 0) <= 1:
            raise NotBuiltIn(f"{option}={values[option]} is not built in; expected a number from 0 to 1")


_CLASSES = {
    "AdamW": _adam("AdamW"),
    "Adam": _adam("Adam"),
    "SGD": _Class("SGD", _options("lr momentum dampening weight_decay nesterov maximize", no_effect=_SPEED), check=_within),
    "Adagrad": _Class("Adagrad", _options("lr lr_decay eps weight_decay maximize", only={"initial_accumulator_value": _OFF},
                                          no_effect=_SPEED)),
    "RMSprop": _Class("RMSprop", _options("lr alpha eps weight_decay momentum centered maximize", no_effect=_SPEED), check=_within),
    # of tessera.deepspeed.ops; what their constructors refuse is kept nowhere
    "FusedAdam": _of_deepspeed("AdamW", _ADAM + " bias_correction", chooses="adam_w_mode", no_effect=("amsgrad", "set_grad_none")),
    "DeepSpeedCPUAdam": _of_deepspeed("AdamW", _ADAM + " bias_correction", only={"amsgrad": _OFF}, chooses="adamw_mode",
                                      no_effect=("fp32_optimizer_states",)),
    "DeepSpeedCPUAdagrad": _of_deepspeed("Adagrad", "lr eps weight_decay", only={"amsgrad": _OFF}, no_effect=("fp32_optimizer_states",)),
    "FusedLamb": _of_deepspeed("LAMB", _ADAM + " bias_correction max_coeff min_coeff",
                               only={"max_grad_norm": _Only((0, None), "gradient_clipping in the configuration clips")},
                               no_effect=("amsgrad", "eps_inside_sqrt")),
    "FusedLion": _of_deepspeed("Lion", "lr betas weight_decay", no_effect=("set_grad_none",)),
    "DeepSpeedCPULion": _of_deepspeed("Lion", "lr betas weight_decay", no_effect=("fp32_optimizer_states",)),
}
# The hyper-parameters of each formula, by the configuration's type.
HYPERS = {
    "AdamW": ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "maximize"),
    "Adam": ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "maximize"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "Adagrad": ("lr", "lr_decay", "eps", "weight_decay", "maximize"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
    "Lion": ("lr", "betas", "weight_decay"),
    "LAMB": ("lr", "betas", "eps", "weight_decay", "bias_correction", "max_coeff", "min_coeff"),
    "Muon": ("lr", "adam_lr_ratio", "momentum", "nesterov", "weight_decay", "betas", "eps", "use_muon"),
    "Adafactor": ("lr", "beta2_decay", "eps", "d", "weight_decay", "maximize"),
    "AdamW8bit": ("lr", "betas", "eps", "weight_decay", "optim_bits"),
}
# Options that are the same in all param groups, by the configuration's type.
OF_ALL_GROUPS = {"Muon": ("adam_lr", "muon_lr", "ns_steps", "ns_method", "adjust_lr_fn"), "RMSprop": ("centered",), "AdamW8bit": ("min_8bit_size",)}
# What the optimizers of a configuration refuse in their groups, where somebody writes it there.
_REFUSED = dict.fromkeys(("amsgrad", "maximize", "initial_accumulator_value", "caution", "cautious"), _OFF)


class Options:
    """The options of one optimizer: translates its groups, whenever they are read."""

    def __init__(self, name: str, type_: str, table: _Class, optimizer: Any = None) -> None:
        self.name = name  # for messages
        self.type = type_
        self._table = table
        self._optimizer = optimizer
        self._reads_its_groups = False

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "Options":
        """Of an optimizer of torch.optim or tessera.deepspeed.ops. Raises ConfigError for what the tables do not have."""
        kind = type(optimizer)
        name = full_name(optimizer)
        table = _CLASSES.get(kind.__name__)
        if table is None or not _is_class_of(kind, table.package):
            raise NotBuiltIn(f"{name} is not an optimizer Tessera has; expected AdamW, Adam, SGD, Adagrad or RMSprop of torch.optim, one of "
                             "tessera.deepspeed.ops, or the section \"optimizer\" of the configuration")
        options = cls(name, table.type, table, optimizer)
        options._check_all_known()
        types = {options._chosen_type(group) for group in optimizer.param_groups}
        if len(types) > 1:
            raise NotBuiltIn(f"{name}: some param groups decouple the weight decay and some do not; expected the same in all")
        options.type = types.pop() if types else table.type
        for option in OF_ALL_GROUPS.get(options.type, ()):
            if any(group.get(option) != optimizer.param_groups[0].get(option) for group in optimizer.param_groups):
                raise NotBuiltIn(f"{name}: {option} differs between its param groups; expected the same in all")
        return options

    @classmethod
    def of_type(cls, type_: str) -> "Options":
        """Of the configuration's optimizer."""
        return cls("the configuration's optimizer", type_, _Class(type_, {**_REFUSED, **dict.fromkeys(HYPERS[type_], _HYPER)}))

    @classmethod
    def of_whole(cls, optimizer: torch.optim.Optimizer) -> "Options":
        """Of an optimizer that runs as it is and reads its groups itself. The engine is told of the rates alone, to show them."""
        options = cls(full_name(optimizer), "SGD", _Class("SGD", {"lr": _HYPER}))
        options._reads_its_groups = True  # Adafactor's rate may be None
        return options

    def values(self, group: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The hyper-parameters of a group, as JSON has them. Raises ConfigError, which names `where`, for what is not built in."""
        values = {}
        for option, meaning in self._table.options.items():
            if meaning is _HYPER:
                if option in group and not (group[option] is None and self._reads_its_groups):
                    values[option] = _hyper(option, group[option], f"{where}: {option}")
            elif isinstance(meaning, _Only):
                found = self._value(option, group)
                if found is not _MISSING and plain(found, f"{where}: {option}") not in meaning.values:
                    raise NotBuiltIn(f"{where}: {option}={found} is not built in; expected {meaning.values[0]}"
                                     + (f" ({meaning.advice})" if meaning.advice else ""))
        if self._optimizer is not None and (chosen := self._chosen_type(group)) != self.type:
            raise ConfigError(f"{where}: the weight decay is that of {chosen} now, and was that of {self.type} at initialize(); expected "
                              "no change")
        if self._table.check is not None:
            self._table.check(values)
        return values

    def _check_all_known(self):
        """Every option of the class is in the table, and its value can be seen."""
        parameters = inspect.signature(type(self._optimizer).__init__).parameters.values()
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][2:]  # without self and the parameters
        for option in dict.fromkeys([*named, *self._optimizer.defaults]):
            if option not in self._table.options:
                raise NotBuiltIn(f"{self.name} has an option {option}, which is not known here; expected "
                                 f"{', '.join(self._table.options)}")
            is_seen = all(self._value(option, group) is not _MISSING for group in self._optimizer.param_groups)
            if self._table.options[option] is not _NO_EFFECT and not is_seen:
                raise NotBuiltIn(f"{self.name}: the value of its option {option} cannot be seen in its param groups; expected it there")

    def _chosen_type(self, group):
        for option, meaning in self._table.options.items():
            if meaning is _DECOUPLES:
                value = self._value(option, group)
                return self._table.type if value is _MISSING else "AdamW" if value else "Adam"
        return self._table.type

    def _value(self, option, group):
        if option in group:
            return group[option]
        return getattr(self._optimizer, option, _MISSING) if self._optimizer is not None else _MISSING


def as_hyper(values: Mapping[str, Any]) -> dict[str, Any]:
    """What `Options.values` returns, as `_engine.Engine.set_hyper` takes it."""
    hyper = dict(values)
    if "betas" in hyper:
        hyper["betas[0]"], hyper["betas[1]"] = hyper.pop("betas")
    if isinstance(hyper.get("eps"), list):
        hyper["eps"], hyper["eps2"] = hyper["eps"]
    return hyper


def is_option(name: str) -> bool:
    """Whether some optimizer has an option of this name."""
    return any(name in table.options for table in _CLASSES.values()) or any(name in hypers for hypers in HYPERS.values())


def full_name(optimizer: Any) -> str:
    """Module and class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def plain(value: Any, where: str = "a value") -> Any:
    """A number, text, or list of them, as JSON has it: of a tensor, of NumPy's numbers, of a tuple."""
    if value is None or isinstance(value, (bool, int, str)) or type(value) is float:
        return value
    if isinstance(value, (tuple, list)):
        return [plain(item, where) for item in value]
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if hasattr(value, "__index__"):
        return int(value)
    if hasattr(value, "__float__"):
        return float(value)
    raise ConfigError(f"{where} is {value!r:.60} (a {type(value).__name__}); expected a number")


def _hyper(option, value, where):
    """A number; of betas, and of Adafactor's eps, two."""
    found = plain(value, where)
    if option in _FLAGS and found in (None, 0, 1):
        return bool(found)
    is_pair = option == "betas" or (option == "eps" and isinstance(found, list))  # Adafactor's
    if is_pair and not (isinstance(found, list) and len(found) == 2):
        raise ConfigError(f"{where} is {value!r:.60} (a {type(value).__name__}); expected two numbers")
    try:
        for one in found if is_pair else [found]:
            arguments.number(one, where)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None
    return found


def _is_class_of(kind, package):
    """Whether a module of the package has the class: not one of its name, or derived from it."""
    return f"{kind.__module__}.".startswith(f"{package}.") and getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind

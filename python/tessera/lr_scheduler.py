"""The learning-rate schedule of a configuration, with the interface of torch.optim.lr_scheduler; and schedulers of torch that an
engine steps."""
import inspect
import math
import types
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from tessera.errors import ConfigError, Error

_TAG = "tessera.value"  # of what JSON has not


class LRScheduler:
    """The schedule of the configuration's section `scheduler`. `engine.step()` advances it at every step that updates."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def get_last_lr(self) -> list[float]:
        """The rates of the next step, by param group."""
        return self._engine().get_lr()

    get_lr = get_last_lr

    @property
    def last_epoch(self) -> int:
        """The number of steps that have updated."""
        return self._engine().global_steps - self._engine().skipped_steps

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `engine.step()` has advanced the schedule."""

    def state_dict(self) -> dict[str, Any]:
        """For display: a checkpoint of the engine brings the schedule's place."""
        return {"last_epoch": self.last_epoch, "_last_lr": self.get_last_lr()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Does nothing, for the same reason."""


class StepsScheduler:
    """What an engine does with a scheduler of the caller's. `Engine` derives from it."""

    lr_scheduler: Any
    steps_scheduler_now = False  # a step() of it comes from here
    _looked_at = None
    _needs_arguments = False

    def attach_scheduler(self, scheduler: Any) -> None:
        """Have step() step a scheduler of the caller's, which writes rates into the optimizer's param groups."""
        self.lr_scheduler = scheduler
        if not needs_arguments(scheduler):
            refuse_steps_of_others(scheduler, self)

    @property
    def _steps_lr_scheduler(self):
        """Whether `lr_scheduler` is one of the caller's."""
        return self.lr_scheduler is not None and not isinstance(self.lr_scheduler, LRScheduler)

    def _step_scheduler(self, arguments):
        scheduler = self.lr_scheduler
        if scheduler is not self._looked_at:  # anybody may put another one there
            self._looked_at, self._needs_arguments = scheduler, scheduler is not None and needs_arguments(scheduler)
        if scheduler is None or (self._needs_arguments and not arguments):
            return
        self.steps_scheduler_now = True
        try:
            scheduler.step(**(arguments or {}))
        finally:
            self.steps_scheduler_now = False


def check_writes_into(scheduler: Any, optimizer: torch.optim.Optimizer, client: torch.optim.Optimizer | None) -> None:
    """Raises ConfigError for a scheduler that writes rates into the groups of another optimizer than the engine's."""
    owner = getattr(scheduler, "optimizer", None)
    if isinstance(owner, torch.optim.Optimizer) and owner is not optimizer and owner is not client:
        raise ConfigError(f"lr_scheduler is a {type(scheduler).__name__} of another optimizer than the engine's, whose rates it would not "
                          "change; expected one of the optimizer given to initialize(), or a callable(optimizer) that makes one")


def needs_arguments(scheduler: Any) -> bool:
    """Whether `step` cannot be called without arguments: ReduceLROnPlateau's needs a metric, which only the loop knows."""
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
               for p in inspect.signature(scheduler.step).parameters.values())


def refuse_steps_of_others(scheduler: Any, engine: Any) -> None:
    """From now on `step()` of a scheduler that `engine.step()` steps is an Error where anybody else calls it.

    Its class becomes one derived from its own: an attribute of the object would be in its state_dict().
    """
    kind = type(scheduler)
    of_engine = weakref.ref(engine)

    def step(self, *args, **kwargs):
        engine = of_engine()
        if engine is not None and engine.lr_scheduler is self and not engine.steps_scheduler_now:
            raise Error(f"{kind.__name__}.step(): engine.step() steps the scheduler that initialize() was given, and this would be a second "
                        "step. Take this call out; or make the scheduler after initialize(), with the optimizer that it returns, and step it "
                        "yourself")
        return kind.step(self, *args, **kwargs)

    try:
        scheduler.__class__ = types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(
            step=step, __module__=kind.__module__, __qualname__=kind.__qualname__, __doc__=kind.__doc__))
    except TypeError:  # a class of one's own that cannot be derived from, or with another layout
        return


def saved_state(scheduler: Any) -> Any:
    """`state_dict()` of a scheduler as JSON: numbers that are not finite, tuples and tensors are marked. Raises Error for what else a
    scheduler of one's own may hold."""
    return _to_json(scheduler.state_dict(), f"the state of the {type(scheduler).__name__}")


def load_saved_state(scheduler: Any, state: Any) -> None:
    """The inverse."""
    scheduler.load_state_dict(_from_json(state))


def _to_json(value, where):
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: "float", "of": repr(float(value))}
    if isinstance(value, list):
        return [_to_json(item, where) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "of": [_to_json(item, where) for item in value]}
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", "of": _to_json(value.tolist(), where), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: _to_json(item, f"{where}, {key}") for key, item in value.items()}
        return {_TAG: "Counter" if isinstance(value, Counter) else "dict", "of": [[_to_json(key, where), _to_json(item, where)] for key, item in value.items()]}
    if hasattr(value, "item"):  # NumPy's numbers
        return _to_json(value.item(), where)
    raise Error(f"save_checkpoint(): {where}: {value!r:.60} (a {type(value).__name__}) cannot be saved; expected numbers, texts, lists, "
                "tuples, dicts and tensors")


def _from_json(value):
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _from_json(item) for key, item in value.items()}
    of = _from_json(value["of"])
    if value[_TAG] == "float":
        return float(of)
    if value[_TAG] == "tuple":
        return tuple(of)
    if value[_TAG] == "tensor":
        return torch.tensor(of, dtype=getattr(torch, value["dtype"]))
    return (Counter if value[_TAG] == "Counter" else dict)(dict(of))

"""The learning-rate schedule of a configuration, with the interface of torch.optim.lr_scheduler; and schedulers of torch that an
engine steps."""
import functools
import inspect
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessera import _engine, arguments, json_values
from tessera.errors import CannotBeCopied, ConfigError, Error


class LRScheduler:
    """The schedule of the configuration's section `scheduler`. `engine.step()` advances it at every step that updates."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def get_last_lr(self) -> list[float]:
        """The rates of the next step, by param group."""
        return self._live().get_lr()

    get_lr = get_last_lr

    @property
    def last_epoch(self) -> int:
        """The number of updates that the schedule has counted."""
        return self._live()._engine.schedule_steps

    def step(self, epoch: int | None = None) -> None:
        """Does nothing, because `engine.step()` has advanced the schedule; with a number, moves the schedule there."""
        if epoch is not None:
            self._move_to(epoch, "step(): epoch")

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is. A checkpoint of the engine has it, too."""
        return {"last_epoch": self.last_epoch, "_last_lr": self.get_last_lr()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Moves the schedule to the place in `state_dict`. The same on all ranks."""
        arguments.check_state(state_dict, ["last_epoch"], "the engine's scheduler")
        self._move_to(state_dict["last_epoch"], "load_state_dict(): last_epoch")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises CannotBeCopied: where the schedule is, the engine knows."""
        _refuse_copy()

    def _move_to(self, steps, name):
        engine = self._live()
        engine._engine.set_schedule_steps(arguments.integer(steps, name, 0))
        engine.optimizer.pull()

    def _live(self):
        engine = self._engine()
        if engine is None:
            raise Error("the scheduler's engine is gone; expected it to be kept while its scheduler is used")
        return engine


class StepsScheduler:
    """What an engine does with a scheduler of the caller's. `Engine` derives from it."""

    lr_scheduler: Any
    steps_scheduler_now = False  # a step() of it comes from here
    _looked_at = None
    _needs_arguments = False

    def attach_scheduler(self, scheduler: Any) -> None:
        """Have step() step a scheduler of the caller's, which writes rates into the optimizer's param groups."""
        self.lr_scheduler = scheduler
        check_state_of(scheduler)
        if not needs_arguments(scheduler):
            refuse_steps_of_others(scheduler, self)

    @property
    def _steps_lr_scheduler(self):
        """Whether `lr_scheduler` is one of the caller's."""
        return self.lr_scheduler is not None and not isinstance(self.lr_scheduler, LRScheduler)

    def _check_arguments_of_scheduler(self, arguments):
        """Before the step, because what its scheduler refuses afterwards would leave a schedule that is a step behind."""
        scheduler = self.lr_scheduler
        if scheduler is None:
            raise Error("step(lr_kwargs=): the engine has no scheduler that would get them; expected one given to initialize(lr_scheduler=). One that "
                        "was made after it is stepped by the loop: scheduler.step(...)")
        try:
            inspect.signature(scheduler.step).bind(**arguments)
        except TypeError as error:
            raise Error(f"step(lr_kwargs=): {type(scheduler).__name__}.step(): {error}; expected its arguments") from None

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


def _refuse_copy():
    raise CannotBeCopied("the scheduler of an engine cannot be pickled or copied, as its optimizer cannot; expected scheduler.state_dict(), or "
                         "engine.save_checkpoint(folder), which has it")


def is_factory(scheduler: Any) -> bool:
    """Whether it is a callable(optimizer) that makes a scheduler: a class, too."""
    return callable(scheduler) and (isinstance(scheduler, type) or not hasattr(scheduler, "step"))


def check_scheduler(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer | None]) -> None:
    """Raises ConfigError for what is no scheduler, and for one that writes rates into the groups of another optimizer than these."""
    if is_factory(scheduler):
        return
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigError(f"lr_scheduler is {arguments.shown(scheduler)}; expected a scheduler of "
                          "torch.optim.lr_scheduler, or a callable(optimizer) that makes one; schedules by name are in the section "
                          "\"scheduler\" of the configuration")
    owner = getattr(scheduler, "optimizer", None)
    if isinstance(owner, torch.optim.Optimizer) and not any(owner is optimizer for optimizer in optimizers):
        raise ConfigError(f"lr_scheduler is a {type(scheduler).__name__} of another optimizer than the engine's, whose rates it would not "
                          "change; expected one of the optimizer given to initialize(), or a callable(optimizer) that makes one")


def check_state_of(scheduler: Any) -> None:
    """Raises ConfigError where no checkpoint could have the state of a scheduler."""
    name = f"lr_scheduler, a {type(scheduler).__name__},"
    if not callable(getattr(scheduler, "state_dict", None)) or not callable(getattr(scheduler, "load_state_dict", None)):
        raise ConfigError(f"{name} has no state_dict() and load_state_dict(), so that save_checkpoint() could not save it; expected both")
    try:
        json_values.encode(scheduler.state_dict(), "lr_scheduler.state_dict()")
    except json_values.Unsupported as error:
        raise ConfigError(f"{name} could not be saved by save_checkpoint(): {error}") from None


def needs_arguments(scheduler: Any) -> bool:
    """Whether `step` cannot be called without arguments: ReduceLROnPlateau's needs a metric, which only the loop knows."""
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
               for p in inspect.signature(scheduler.step).parameters.values())


def refuse_steps_of_others(scheduler: Any, engine: Any) -> None:
    """From now on `step()` of a scheduler that `engine.step()` steps is an Error where anybody else calls it.

    Its class becomes one derived from its own: an attribute of the object would be in its state_dict().
    """
    kind = type(scheduler)
    if not callable(getattr(kind, "step", None)):
        return  # an attribute of the object
    of_engine = weakref.ref(engine)

    @functools.wraps(kind.step)  # its signature, too
    def step(self, *args, **kwargs):
        engine = of_engine()
        in_use = engine is not None and isinstance(engine._engine, _engine.Engine)
        if in_use and engine.lr_scheduler is self and not engine.steps_scheduler_now:
            raise Error(f"{kind.__name__}.step(): engine.step() steps the scheduler that initialize() was given, and this would be a second "
                        "step. Take this call out; or make the scheduler after initialize(), with the optimizer that it returns, and step it "
                        "yourself")
        return kind.step(self, *args, **kwargs)

    def reduce(self, protocol):
        engine = of_engine()
        if engine is not None and isinstance(engine._engine, _engine.Engine):
            _refuse_copy()
        self.__class__ = kind  # as it was
        return kind.__reduce_ex__(self, protocol)

    try:
        scheduler.__class__ = types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(
            step=step, __reduce_ex__=reduce, __module__=kind.__module__, __qualname__=kind.__qualname__, __doc__=kind.__doc__))
    except TypeError:  # a class of one's own that cannot be derived from, or with another layout
        return

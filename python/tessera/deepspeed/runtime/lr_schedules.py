"""`deepspeed.runtime.lr_schedules`: DeepSpeed's schedules as classes, for an optimizer of torch or the one that `initialize` returns.

They compute what the section "scheduler" of a configuration computes. LRRangeTest and OneCycle follow L. Smith, "A disciplined approach
to neural network hyper-parameters: Part 1" (arXiv 1803.09820), in DeepSpeed's form.
"""
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessera import _engine, arguments
from tessera.deepspeed import stand_in
from tessera.deepspeed.configured import ConfiguredType

__getattr__ = stand_in.getattr_of("deepspeed.runtime.lr_schedules")
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
# Names of the parameters in a configuration.
LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE = "lr_range_test_min_lr", "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE = "lr_range_test_step_size", "lr_range_test_staircase"
CYCLE_FIRST_STEP_SIZE, CYCLE_FIRST_STAIR_COUNT = "cycle_first_step_size", "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT = "cycle_second_step_size", "cycle_second_stair_count"
DECAY_STEP_SIZE, CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE = "decay_step_size", "cycle_min_lr", "cycle_max_lr", "decay_lr_rate"
CYCLE_MIN_MOM, CYCLE_MAX_MOM, DECAY_MOM_RATE = "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"
WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS, WARMUP_TYPE = "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"
WARMUP_MIN_RATIO, COS_MIN_RATIO, TOTAL_NUM_STEPS = "warmup_min_ratio", "cos_min_ratio", "total_num_steps"


class _Schedule(metaclass=ConfiguredType):
    """Writes rates into the param groups of an optimizer, at each `step`. A class derived from it has `get_lr`.

    Attributes
    ----------
    optimizer : torch.optim.Optimizer
    last_batch_iteration : int
        The step whose rates are in the groups, from 0; -1 before the first.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration

    def get_lr(self) -> list[float]:
        """The rates at `last_batch_iteration`, by param group."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rates that were written last."""
        if not hasattr(self, "_last_lr"):
            raise AssertionError("get_last_lr(): no rates were written yet; expected a step() before")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Write the rates of the next step, or of the one that is given."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self._write()

    def state_dict(self) -> dict[str, int]:
        """The place in the schedule."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, int]) -> None:
        """Move there. The rates are written by the next step, as in DeepSpeed."""
        arguments.check_state(sd, ["last_batch_iteration"], f"a {type(self).__name__}")
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _write(self):
        self._last_lr = update_lr(self.optimizer.param_groups, self.get_lr())

    def _for_groups(self, value, name):
        """A value for each param group: of one for all, or of a list."""
        groups = self.optimizer.param_groups
        if not isinstance(value, (list, tuple)):
            return [value] * len(groups)
        if len(value) != len(groups):
            raise ValueError(f"{name} has {len(value)} values; expected {len(groups)}, one for each param group")
        return list(value)


class LRRangeTest(_Schedule):
    """lr = min_lr * (1 + step_rate * (t + 1) / step_size), for finding the largest rate that trains; with `staircase` rounded down to
    whole multiples of `step_size`.

    Raises ValueError for a step size that is no int from 1, or another number of rates than of param groups.
    """

    def __init__(self, optimizer: Any, lr_range_test_min_lr: float | Sequence[float] = 1e-3, lr_range_test_step_size: int = 2000,
                 lr_range_test_step_rate: float = 1.0, lr_range_test_staircase: bool = False, last_batch_iteration: int = -1) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._for_groups(lr_range_test_min_lr, LR_RANGE_TEST_MIN_LR)
        self.step_size = _positive(lr_range_test_step_size, LR_RANGE_TEST_STEP_SIZE)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._last_lr = update_lr(self.optimizer.param_groups, self.min_lr)

    def get_lr(self) -> list[float]:
        """See the class."""
        interval = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return [rate * (1 + self.step_rate * interval) for rate in self.min_lr]


class OneCycle(_Schedule):
    """The rate goes from `cycle_min_lr` to `cycle_max_lr` in `cycle_first_step_size` steps, back in `cycle_second_step_size`, and then
    decays: lr = cycle_min_lr / (1 + decay_lr_rate * n / decay_step_size), n steps after the cycle. Adam's first beta goes the other way,
    from `cycle_max_mom` to `cycle_min_mom`, and then to cycle_max_mom * (1 + decay_mom_rate * n / decay_step_size); the second is 0.99.

    A stair count above 0 makes that half of the cycle go in so many stairs. An optimizer without betas keeps its momentum, with a warning.
    """

    def __init__(self, optimizer: Any, cycle_min_lr: float | Sequence[float], cycle_max_lr: float | Sequence[float],
                 decay_lr_rate: float = 0.0, cycle_first_step_size: int = 2000, cycle_second_step_size: int | None = None,
                 cycle_first_stair_count: int = 0, cycle_second_stair_count: int | None = None, decay_step_size: int = 0,
                 cycle_momentum: bool = True, cycle_min_mom: float | Sequence[float] = 0.8, cycle_max_mom: float | Sequence[float] = 0.9,
                 decay_mom_rate: float = 0.0, last_batch_iteration: int = -1) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.first_step_size = float(cycle_first_step_size)
        self.second_step_size = self.first_step_size if cycle_second_step_size is None else float(cycle_second_step_size)
        if self.first_step_size <= 0 or self.second_step_size < 0:
            raise ValueError(f"cycle_first_step_size is {cycle_first_step_size} and cycle_second_step_size {cycle_second_step_size}; expected "
                             "steps above 0 and from 0")
        self.total_size = self.first_step_size + self.second_step_size
        self.stair_counts = (cycle_first_stair_count, cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count)
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs = self._for_groups(cycle_min_lr, CYCLE_MIN_LR)
        self.max_lrs = self._for_groups(cycle_max_lr, CYCLE_MAX_LR)
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults and "use_muon" not in self.optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            _engine.log_warning(f"OneCycle: {type(self.optimizer).__name__} has no betas, or is Muon, so that cycle_momentum has no effect; set it to false")
        if self.cycle_momentum:
            self.min_moms = self._for_groups(cycle_min_mom, CYCLE_MIN_MOM)
            self.max_moms = self._for_groups(cycle_max_mom, CYCLE_MAX_MOM)
        if last_batch_iteration == -1:
            self._last_lr = update_lr(self.optimizer.param_groups, self.min_lrs)
            if self.cycle_momentum:
                self._write_betas(self.min_moms)

    def get_lr(self) -> list[float]:
        """See the class."""
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs)]
        return [low / (1 + self._decay(self.decay_lr_rate)) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Adam's betas at `last_batch_iteration`, by param group; None without `cycle_momentum`."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [(high - (high - low) * height, 0.99) for low, high in zip(self.min_moms, self.max_moms)]
        return [(high * (1 + self._decay(self.decay_mom_rate)), 0.99) for high in self.max_moms]

    def _write(self):
        super()._write()
        if self.cycle_momentum:
            self._write_betas([beta1 for beta1, _ in self.get_mom()])

    def _write_betas(self, first_betas):
        for group, beta1 in zip(self.optimizer.param_groups, first_betas):
            group["betas"] = (beta1, 0.99)

    def _height(self):
        """How far the rate is from its smallest to its largest, 0 to 1."""
        position = math.fmod(self.last_batch_iteration + 1, self.total_size)
        rises = position <= self.first_step_size
        height = position / self.first_step_size if rises else (self.total_size - position) / self.second_step_size
        stairs = self.stair_counts[0 if rises else 1]
        if stairs <= 0:
            return height
        # The product first: a quotient of 0.999… at the end of a half would lose its last stair.
        return math.floor(position * stairs / self.first_step_size if rises else
                          (self.total_size - position) * stairs / self.second_step_size) / stairs

    def _decay(self, rate):
        if math.isclose(self.decay_step_size, 0):
            return 0.0
        return rate * (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size


class _Warmup(_Schedule):
    """What the schedules with a warm-up have in common."""

    def __init__(self, optimizer, warmup_num_steps, warmup_type, last_batch_iteration):
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_num_steps = max(2, _positive(warmup_num_steps, WARMUP_NUM_STEPS))
        if warmup_type not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            raise ValueError(f"warmup_type is {warmup_type!r}; expected '{WARMUP_LOG_RATE}' or '{WARMUP_LINEAR_RATE}'")
        self.warmup_type = warmup_type

    def _progress(self):
        """How far the warm-up is, 0 to 1; None after it."""
        if self.last_batch_iteration >= self.warmup_num_steps:
            return None
        if self.warmup_type == WARMUP_LOG_RATE:
            return math.log(self.last_batch_iteration + 1) / math.log(self.warmup_num_steps)
        return self.last_batch_iteration / self.warmup_num_steps

    def _check_total(self):
        if self.total_num_steps < self.warmup_num_steps:
            _engine.log_warning(f"{type(self).__name__}: total_num_steps is {self.total_num_steps}, fewer than warmup_num_steps, {self.warmup_num_steps}")


class WarmupLR(_Warmup):
    """The rate goes from `warmup_min_lr` to `warmup_max_lr`, None: the optimizer's, in `warmup_num_steps` steps, by
    log(t + 1) / log(warmup_num_steps), or linearly, and stays there."""

    def __init__(self, optimizer: Any, warmup_min_lr: float | Sequence[float] = 0.0, warmup_max_lr: float | Sequence[float] | None = None,
                 warmup_num_steps: int = 1000, warmup_type: str = WARMUP_LOG_RATE, last_batch_iteration: int = -1) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.min_lrs = self._for_groups(warmup_min_lr, WARMUP_MIN_LR)
        self.max_lrs = self._for_groups(warmup_max_lr, WARMUP_MAX_LR)
        if last_batch_iteration == -1:
            self._write()

    def get_lr(self) -> list[float]:
        """See the class; before the first step `warmup_min_lr`."""
        if self.last_batch_iteration < 0:
            return self.min_lrs
        progress = self._progress()
        part = self._after_warmup() if progress is None else progress
        return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs)]

    def _after_warmup(self):
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As WarmupLR, and then linearly down to `warmup_min_lr` at `total_num_steps`."""

    def __init__(self, optimizer: Any, total_num_steps: int, warmup_min_lr: float | Sequence[float] = 0.0,
                 warmup_max_lr: float | Sequence[float] = 0.001, warmup_num_steps: int = 1000, warmup_type: str = WARMUP_LOG_RATE,
                 last_batch_iteration: int = -1) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        self._check_total()

    def _after_warmup(self):
        left, steps = self.total_num_steps - self.last_batch_iteration, self.total_num_steps - self.warmup_num_steps
        return max(0.0, left / max(1.0, steps))


class WarmupCosineLR(_Warmup):
    """The optimizer's rate times a ratio, which goes from `warmup_min_ratio` to 1 in `warmup_num_steps` steps, and by a cosine down to
    `cos_min_ratio` at `total_num_steps`."""

    def __init__(self, optimizer: Any, total_num_steps: int, warmup_min_ratio: float = 0.0, warmup_num_steps: int = 1000,
                 cos_min_ratio: float = 0.0001, warmup_type: str = WARMUP_LOG_RATE, last_batch_iteration: int = -1) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self._check_total()
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        if last_batch_iteration == -1:
            self._write()

    def get_lr_ratio(self) -> float:
        """See the class; before the first step 0."""
        if self.last_batch_iteration < 0:
            return 0.0
        progress = self._progress()
        if progress is not None:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * progress
        done = min(1.0, (self.last_batch_iteration - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps))
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)

    def get_lr(self) -> list[float]:
        """The optimizer's rates times `get_lr_ratio()`."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


def update_lr(param_groups: list[dict[str, Any]], lrs: Sequence[float]) -> list[float]:
    """Write a rate into each group, in place where it is a tensor. Returns what the groups have."""
    for group, rate in zip(param_groups, lrs):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate.squeeze() if isinstance(rate, torch.Tensor) else rate)
        else:
            group["lr"] = rate
    return [group["lr"] for group in param_groups]


def get_torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer itself, or the one that it wraps as `optimizer`. Raises TypeError for neither."""
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise TypeError(f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer, or what wraps one as `optimizer`")


def _positive(value, name):
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} is {value!r}; expected a positive integer")
    return value

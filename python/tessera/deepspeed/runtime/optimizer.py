"""The optimizer and the schedule of a `DeepSpeedEngine`, with DeepSpeed's further names."""
import functools
from collections.abc import Mapping
from typing import Any

import torch

from tessera import arguments, zero
from tessera.deepspeed.ops import adagrad, adam, lamb, lion
from tessera.deepspeed.runtime import lr_schedules
from tessera.deepspeed.utils.parameters import local_part
from tessera.lr_scheduler import LRScheduler
from tessera.optimizer import Optimizer, schedule_sets_betas


class LossScale:
    """How the loss is scaled at the time of asking: `optimizer.loss_scaler`, and `optimizer.loss_scale_config`, its newer name. Cannot be
    written.

    Attributes
    ----------
    cur_scale, loss_scale : float
        By which the next loss is multiplied; 1.0 without fp16.
    dynamic, dynamic_loss_scale : bool
        Whether it changes with overflows; False where `fp16.loss_scale` says it, and without fp16.
    use_grad_scaling : bool
        Whether losses are scaled.
    cur_iter : int
        Optimizer steps, skipped ones included.
    scale_window, scale_factor, min_scale, min_loss_scale, delayed_shift
        Of `fp16` in the configuration: loss_scale_window, 2.0, min_loss_scale, hysteresis. None where the scale is not dynamic.
    """

    def __init__(self, engine: Any) -> None:
        fp16 = engine.config["fp16"]
        autocast = engine.config["torch_autocast"]
        self._engine = engine
        self.use_grad_scaling = fp16["enabled"] or (autocast["enabled"] and autocast["dtype"] == "fp16")
        self.dynamic = self.dynamic_loss_scale = self.use_grad_scaling and fp16["loss_scale"] == 0
        self.scale_window, self.scale_factor, self.min_scale, self.delayed_shift = (
            (fp16["loss_scale_window"], 2.0, fp16["min_loss_scale"], fp16["hysteresis"]) if self.dynamic else (None, None, None, None))
        self.min_loss_scale = self.min_scale

    cur_scale = loss_scale = property(lambda self: self._engine.loss_scale)
    cur_iter = property(lambda self: self._engine.global_steps)


class _ParameterOffload:
    """What libraries take away from a model at stage 3 while it generates, and give back: hooks, of which Tessera has none."""

    def __init__(self, module):
        self.module = module
        self.forward_hooks, self.backward_hooks = [], []

    def _register_deepspeed_module(self, module):
        """Does nothing: operators gather the parameters that they read."""


# Names of deepspeed.runtime.fp16.loss_scaler.
LossScaleConfig = LossScalerBase = LossScaler = DynamicLossScaler = LossScale
INITIAL_LOSS_SCALE, SCALE_WINDOW, DELAYED_SHIFT = "init_scale", "scale_window", "delayed_shift"
CONSECUTIVE_HYSTERESIS, MIN_LOSS_SCALE = "consecutive_hysteresis", "min_scale"

# The classes that DeepSpeed makes of `optimizer.type`: without, and with, an offload of the optimizer.
_CLASSES = {"Adam": (adam.FusedAdam, adam.DeepSpeedCPUAdam), "AdamW": (adam.FusedAdam, adam.DeepSpeedCPUAdam),
            "Lion": (lion.FusedLion, lion.DeepSpeedCPULion), "LAMB": (lamb.FusedLamb, lamb.FusedLamb),
            "Adagrad": (None, adagrad.DeepSpeedCPUAdagrad)}


@functools.cache
def _named(name, kind):
    return type(name, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class DeepSpeedOptimizer(Optimizer):
    """The optimizer that `initialize` returns: see `tessera.Optimizer`.

    Attributes
    ----------
    configured_class : type, optional
        Of the optimizer that the configuration names, the class of `deepspeed.ops` that it has in DeepSpeed: `isinstance` asks for it.
    """

    configured_class = None

    def __init__(self, engine: Any, client: torch.optim.Optimizer | None = None, groups: list[dict[str, Any]] | None = None) -> None:
        super().__init__(engine, client, groups)
        kind = engine.config["optimizer"]["type"]
        if client is None:
            if kind in _CLASSES:
                self.configured_class = _CLASSES[kind][engine.zero_offload_optimizer() is not None]
            name = self.configured_class.__name__ if self.configured_class else "MuonWithAuxAdam" if kind == "Muon" else kind
            self.__class__ = _named(name, type(self))  # scripts ask for the name, too
        if kind in ("Adam", "AdamW"):
            self.adam_w_mode = kind == "AdamW"  # whether weight decay is decoupled

    loss_scaler = loss_scale_config = property(lambda self: LossScale(self._live()), doc="How the loss is scaled.")
    loss_scale = cur_scale = property(lambda self: self._live().loss_scale, doc="By which the next loss is multiplied; 1.0 without fp16.")
    dynamic_loss_scale = property(lambda self: self.loss_scaler.dynamic, doc="Whether the scale changes with overflows.")
    custom_loss_scaler = False
    optimizer = property(lambda self: self if self._client is None else self._client, doc="What `initialize` was given; without one this.")
    param_names = property(lambda self: {parameter: name for name, parameter in reversed(self._live().named_tensors)}, doc="By parameter.")

    @property
    def parameter_offload(self) -> _ParameterOffload:
        """At stage 3 an object without hooks, for libraries that take DeepSpeed's away; else an AttributeError."""
        engine = self._live()
        if engine.zero_optimization_stage() != 3:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute 'parameter_offload': it is that of stage 3")
        return _ParameterOffload(engine.module)

    def get_lr(self) -> list[float]:
        """The rates of the next step, by param group."""
        return self._live().get_lr()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """As `engine.backward()`."""
        return self._live().backward(loss, retain_graph)

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """By param group, the parts of all its parameters' master weights that DeepSpeed's stage 3 gives this rank, as a copy. Collective."""
        engine = self._live()
        return [torch.cat([local_part(engine, master) for master in self._masters(group)]) for group in self.param_groups]

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """By param group, the part of its master weights that DeepSpeed's stages 1 and 2 give this rank, as a copy. Collective."""
        engine = self._live()
        return [local_part(engine, torch.cat([master.flatten() for master in self._masters(group)])) for group in self.param_groups]

    def _masters(self, group):
        return [self._live().full_parameter(zero.owner_of(parameter)[2]) for parameter in group["params"]]

    def needs_scaler(self) -> bool:
        """Whether losses are scaled, so that `loss.backward()` needs `engine.scale(loss)`."""
        return self.loss_scaler.use_grad_scaling

    def refresh_fp32_params(self) -> None:
        """Does nothing: what is written into parameters, inside of GatheredParameters, is in the fp32 masters."""


ZeROOptimizer = DeepSpeedOptimizer  # of deepspeed.runtime.base_optimizer


class DeepSpeedScheduler(LRScheduler):
    """The schedule of the configuration: see `tessera.lr_scheduler.LRScheduler`."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.configured_class = getattr(lr_schedules, engine.scheduler_name(), None)  # isinstance asks for it

    last_batch_iteration = property(lambda self: self.last_epoch - 1, doc="The step whose rates are in the groups, from 0; -1 before the first.")
    optimizer = property(lambda self: self._live().optimizer, doc="Whose rates it sets.")

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Does nothing, because `engine.step()` has advanced the schedule; with a number, sets the rates of that step, from 0."""
        if last_batch_iteration is not None:
            self._move_to(arguments.integer(last_batch_iteration, "step(): last_batch_iteration", -1) + 1, "step(): last_batch_iteration")

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is, as DeepSpeed and torch say it. A checkpoint of the engine has it, too."""
        return {"last_batch_iteration": self.last_batch_iteration, **super().state_dict()}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Moves the schedule to the place in `sd`. The same on all ranks."""
        if isinstance(sd, Mapping) and "last_batch_iteration" in sd:
            self.step(sd["last_batch_iteration"])
        else:
            super().load_state_dict(sd)

    def get_mom(self) -> list[Any]:
        """Adam's betas, or SGD's momentum, by param group. Of OneCycle before the first step: `cycle_max_mom`, as DeepSpeed says, though that step
        has `cycle_min_mom`."""
        engine = self._live()
        params = engine.scheduler_params()
        if schedule_sets_betas(engine.config) and self.last_epoch == 0:
            largest = params["cycle_max_mom"]
            groups = len(engine.optimizer.param_groups)
            return [(one, 0.99) for one in (largest if isinstance(largest, list) else [largest] * groups)]
        return engine.get_mom()

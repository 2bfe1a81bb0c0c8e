"""What an engine answers when it is asked for numbers: counters, places, sizes. `Engine` derives from it."""
from typing import Any

import torch

from tessera import _engine
from tessera.optimizer_options import plain


class EngineProperties:
    """The numbers of `self._engine`. None is collective."""

    _engine: _engine.Engine
    optimizer: Any
    _samples_before = _steps_before = 0  # when a checkpoint was loaded
    _micro_steps_before = 0  # at the last step
    config: dict[str, Any]
    device: torch.device
    global_rank: int
    local_rank: int
    world_size: int

    @property
    def global_steps(self) -> int:
        """Optimizer steps, skipped ones included."""
        return self._engine.global_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped, because gradients were not finite."""
        return self._engine.skipped_steps

    @property
    def micro_steps(self) -> int:
        """Backward passes."""
        return self._engine.micro_steps

    @property
    def global_samples(self) -> int:
        """Samples of all optimizer steps, over all ranks, as DeepSpeed counts them; the monitors' values stand beside it."""
        return self._samples_before + (self.global_steps - self._steps_before) * self.train_batch_size()

    def _count_samples(self):
        """A step was taken. Without managed_gradient_accumulation it may have had any number of micro-steps."""
        more = self.micro_steps - self._micro_steps_before - self.gradient_accumulation_steps()
        self._forget_micro_steps()
        if not self.config["managed_gradient_accumulation"]:
            self._samples_before += more * self.train_micro_batch_size_per_gpu() * self.world_size

    def _forget_micro_steps(self):
        """Those until now count in no step to come: theirs was taken, or their gradients were discarded."""
        self._micro_steps_before = self.micro_steps

    def _set_global_samples(self, samples):
        """Those until now, of the steps that a checkpoint has."""
        self._samples_before, self._steps_before, self._micro_steps_before = samples, self.global_steps, self.micro_steps

    @property
    def flops_per_step(self) -> int | None:
        """Model FLOPs of one optimizer step of this rank, once `flops_profiler` has counted them."""
        return self._engine.flops_per_step

    @property
    def loss_scale(self) -> float:
        """By which the next loss is multiplied; 1 without fp16."""
        return self._engine.loss_scale

    def get_global_grad_norm(self) -> float:
        """The L2 norm of the last step's gradients over all parameters and ranks, unscaled, before clipping."""
        return self._engine.gradient_norm

    def get_lr(self) -> list[float]:
        """The rates of the next step, by param group."""
        return [plain(group["lr"]) for group in self.optimizer.param_groups]

    def train_batch_size(self) -> int:
        """Samples of a step, over all ranks and micro-steps."""
        return self.config["train_batch_size"]

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one `backward` on one rank."""
        return self.config["train_micro_batch_size_per_gpu"]

    def gradient_accumulation_steps(self) -> int:
        """Calls of `backward` in a step."""
        return self.config["gradient_accumulation_steps"]

    def gradient_clipping(self) -> float:
        """The largest norm of the gradients; 0: they are not clipped."""
        return self.config["gradient_clipping"]

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.config["zero_optimization"]["stage"]

    def measured_bytes(self) -> dict[str, int]:
        """Bytes of model state that this rank holds, measured from its tensors: {"parameters", "gradients", "master", "optimizer",
        "snapshot", "total"}. `formula_bytes` is what the formula says."""
        return self._engine.measured_bytes()

    def formula_bytes(self) -> dict[str, int]:
        """What `measured_bytes` should be, by the formula of the stage."""
        return self._engine.formula_bytes()

"""`deepspeed.checkpointing`: a segment of a model that is computed again in backward, by torch.utils.checkpoint.

`activation_checkpointing.policy` in the configuration does it without calls in the model (docs/activations.md).
"""
import functools
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from tessera.errors import Error

_configured = {"is": False}


def configure(mpu_: None = None, deepspeed_config: Any = None, partition_activations: bool | None = None,
              contiguous_checkpointing: bool | None = None, num_checkpoints: int | None = None, checkpoint_in_cpu: bool | None = None,
              synchronize: bool | None = None, profile: bool | None = None) -> None:
    """Accepts the defaults. Raises Error for what would partition, move or time what is kept.

    `num_checkpoints` is of contiguous memory, and has no effect; neither has `deepspeed_config`, which the engine reads.
    """
    for name, value in (("mpu_", mpu_), ("partition_activations", partition_activations), ("contiguous_checkpointing", contiguous_checkpointing),
                        ("checkpoint_in_cpu", checkpoint_in_cpu), ("synchronize", synchronize), ("profile", profile)):
        if value:
            raise Error(f"deepspeed.checkpointing.configure({name}={value!r}) is not in Tessera's stand-in for DeepSpeed; expected None or False. "
                        "\"activation_checkpointing\": {\"policy\": …} in the configuration keeps less, or offloads it")
    _configured["is"] = True


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _configured["is"]


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, of which autograd keeps the arguments alone: backward computes it again, with the same random numbers."""
    return torch_checkpoint.checkpoint(functools.partial(function, **kwargs), *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def reset() -> None:
    """Does nothing: no memory is kept between steps."""


def set_num_layers(nlayers: int) -> None:
    """Does nothing: it would size contiguous memory."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Raises Error for True: see `configure`."""
    configure(partition_activations=partition_activation)


class CudaRNGStatesTracker:
    """Random states by name, for code of Megatron: `with tracker.fork(): ...` draws from a state of its own.

    Of the CUDA device where there is one, else of the CPU.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """A copy of the states, by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Take states that `get_states` has returned."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new state. Raises Exception where the seed or the name is there."""
        if seed in self.seeds_:
            raise Exception(f"seed {seed} already exists")
        if name in self.states_:
            raise Exception(f"cuda rng state {name} already exists")
        before = _get_state()
        _seed(seed)
        self.states_[name] = _get_state()
        self.seeds_.add(seed)
        _set_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Any:
        """Draw from the state of that name inside of the `with`."""
        if name not in self.states_:
            raise Exception(f"cuda rng state {name} is not added")
        before = _get_state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _get_state()
            _set_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device, and the tracker's state "model-parallel-rng" with seed + 2718, as Megatron does on the first rank of its groups."""
    _tracker.reset()
    _seed(seed)
    _tracker.add("model-parallel-rng", seed + 2718)


def _get_state():
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state):
    torch.cuda.set_rng_state(state) if torch.cuda.is_available() else torch.set_rng_state(state)


def _seed(seed):
    torch.cuda.manual_seed(seed) if torch.cuda.is_available() else torch.manual_seed(seed)

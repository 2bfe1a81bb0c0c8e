"""`deepspeed.checkpointing`: a segment of a model that is computed again in backward, by torch.utils.checkpoint.

`activation_checkpointing.policy` in the configuration does it without calls in the model (docs/activations.md).
"""
import functools
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from tessera.deepspeed import stand_in
from tessera.errors import Error

__getattr__ = stand_in.getattr_of("deepspeed.runtime.activation_checkpointing.checkpointing")
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

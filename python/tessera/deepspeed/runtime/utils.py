"""`deepspeed.runtime.utils`."""
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from tessera import comm, zero
from tessera.containers import map_tensors
from tessera.deepspeed.accelerator import get_accelerator
from tessera.errors import Error


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log, on rank 0, the memory of the device and of the host. Only with `force`, as in DeepSpeed."""
    if not force or comm.get_rank() != 0:
        return
    accelerator = get_accelerator()
    gib = 2.0**30
    with open("/proc/meminfo") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in file}
    used = 1 - sizes["MemAvailable"] / sizes["MemTotal"]
    print(f"{message}\nMA {accelerator.memory_allocated() / gib:.2f} GB  Max_MA {accelerator.max_memory_allocated() / gib:.2f} GB  "
          f"CA {accelerator.memory_reserved() / gib:.2f} GB  Max_CA {accelerator.max_memory_reserved() / gib:.2f} GB\n"
          f"CPU Virtual Memory: percent = {100 * used:.1f}%", flush=True)
    accelerator.reset_peak_memory_stats()


def empty_cache() -> None:
    """Give what PyTorch's allocator keeps back to the device."""
    get_accelerator().empty_cache()


def set_random_seed(seed: int) -> None:
    """Of the generators of torch, random and, where it is imported, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def noop_decorator(func: Any) -> Any:
    """The function itself."""
    return func


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """`base(1, key=2)`"""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """A copy in which the tensors are on a device: they move themselves, and keep their identities. With `criterion_func` those that it is true for."""
    def move(tensor):
        if criterion_func is None or criterion_func(tensor):
            tensor.data = tensor.to(device).data
        return tensor

    return map_tensors(item, move)


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: None = None) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, of parameters that no engine has. Returns the norm.

    Raises Error for an engine's, whose `step()` clips, and for `mpu`.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if mpu is not None:
        raise Error("clip_grad_norm_(mpu=): Tessera has data parallelism alone; expected None")
    if any(zero.owner_of(parameter) is not None for parameter in parameters):
        raise Error("clip_grad_norm_(): the gradients are in the engine, whose step() clips; expected \"gradient_clipping\" in the configuration")
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

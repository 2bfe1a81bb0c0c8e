"""`deepspeed.utils.nvtx`."""
import functools
from collections.abc import Callable
from typing import Any

from tessera.deepspeed.accelerator import get_accelerator


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function: a range of its name in traces of the device."""
    @functools.wraps(func)
    def call(*args, **kwargs):
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return call

"""`deepspeed.checkpoint.utils`."""
from typing import Any

from tessera.containers import map_tensors


def clone_tensors_for_torch_save(item: Any, device: Any = None) -> Any:
    """A copy with tensors of their own memory, so that torch.save writes no more than their elements; on the CPU unless `device` is given.
    Goes through dicts, lists, tuples and sets."""
    return map_tensors(item, lambda tensor: tensor.detach().clone().to("cpu" if device is None else device))

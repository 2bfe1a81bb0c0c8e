"""`deepspeed.checkpoint.utils`."""
from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: Any = None) -> Any:
    """A copy with tensors of their own memory, so that torch.save writes no more than their elements; on the CPU unless `device` is given.
    Goes through dicts, lists and tuples."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(torch.device("cpu") if device is None else device)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item

"""Tensors inside of containers: what a batch is made of."""
from collections.abc import Mapping

import torch


def map_tensors(value, convert):
    """A copy of `value` with `convert(tensor)` in the place of each tensor.

    Looks into tuples (named ones too), lists, and mappings such as dict and transformers' BatchEncoding, which keep their types;
    other objects are taken as they are.
    """
    if isinstance(value, torch.Tensor):
        return convert(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, convert) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [map_tensors(item, convert) for item in value]
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, convert) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)
    return value

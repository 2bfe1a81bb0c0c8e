"""Tensors inside of containers: what a batch, or what a module returns, is made of."""
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

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


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in `value`: those that `map_tensors` finds, and those of dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name, None) for field in dataclasses.fields(value)])

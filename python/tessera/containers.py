"""Tensors inside of containers: what a batch, what a module returns, or what an optimizer keeps is made of."""
import copy
import dataclasses
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def map_tensors(value, convert, objects=False):
    """A copy of `value` with `convert(tensor)` in the place of each tensor.

    Looks into tuples (named ones too), lists, deques, sets, and mappings such as dict and transformers' BatchEncoding, which keep their types;
    other objects are taken as they are. `objects`: it looks into those, too, that `is_plain_object`.
    """
    if isinstance(value, torch.Tensor):
        return convert(value)
    if isinstance(value, (tuple, list, deque, set, frozenset)):
        items = [map_tensors(item, convert, objects) for item in value]
        if isinstance(value, list):
            return items
        return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, convert, objects) for key, item in value.items()}
        return items if type(value) is dict else defaultdict(value.default_factory, items) if type(value) is defaultdict else type(value)(items)
    if objects and is_plain_object(value):
        made = copy.copy(value)
        vars(made).update((name, map_tensors(item, convert, objects)) for name, item in vars(value).items())
        return made
    return value


def tensors_in(value: Any, objects: bool = False) -> Iterator[torch.Tensor]:
    """The tensors in `value`: those that `map_tensors` finds, and those of dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, deque, set, frozenset)):
        for item in value:
            yield from tensors_in(item, objects)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()), objects)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name, None) for field in dataclasses.fields(value)], objects)
    elif objects and is_plain_object(value):
        yield from tensors_in(list(vars(value).values()), objects)


def is_plain_object(value: Any) -> bool:
    """Whether an object is its attributes and nothing besides: a new one of its class with the same `vars()` is equal to it."""
    kind = type(value)
    of_object = all(getattr(kind, name, None) is getattr(object, name, None)
                    for name in ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__del__"))
    return of_object and hasattr(value, "__dict__") and not any(vars(base).get("__slots__") for base in kind.__mro__)

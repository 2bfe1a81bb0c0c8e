"""Tensors that are made of others and have no memory of their own, as torchao's quantized ones: classes with `__tensor_flatten__`, which
torch.utils._python_dispatch describes."""
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type, transform_subclass

from tessera.errors import Error

is_wrapper = is_traceable_wrapper_subclass
with_parts = transform_subclass  # of a tensor, and a function of a part's name and the part: another tensor


def parts(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that it is made of, by name."""
    return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}


def name_of(kind: type) -> str:
    """What `made` finds the class by."""
    return f"{kind.__module__}.{kind.__qualname__}"


def made(name: str, parts: dict[str, torch.Tensor], context: Any, shape: list[int], strides: list[int]) -> torch.Tensor:
    """A tensor of the class of that name, which is looked for among those that the program has beside torch's own: nothing is imported.

    Raises
    ------
    Error
        The program has no such class.
    """
    kind = next((one for one in _derived(torch.Tensor) if name_of(one) == name and is_traceable_wrapper_subclass_type(one)
                 and not one.__module__.startswith("torch.")), None)
    if kind is None:
        raise Error(f"{name}, the class of a tensor among the values, is in no module that this program has imported; expected it imported "
                    "before the values are loaded")
    if not all(isinstance(part, torch.Tensor) for part in parts.values()):
        raise Error(f"{name}: its parts {', '.join(parts)} are not all tensors; expected a checkpoint that is not damaged")
    return kind.__tensor_unflatten__(parts, context, torch.Size(shape), tuple(strides))


def _derived(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from _derived(one)

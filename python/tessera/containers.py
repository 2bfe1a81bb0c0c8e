"""Tensors inside of containers: what a batch, what a module returns, or what an optimizer keeps is made of."""
import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from tessera.errors import Error


def map_tensors(value, convert, objects=False, keeps=False):
    """A copy of `value` with `convert(tensor)` in the place of each tensor.

    Looks into tuples (named ones too), lists, deques, sets, and mappings such as dict and transformers' BatchEncoding, which keep their types
    and attributes; other objects are taken as they are. `objects`: it looks into those, too, that `is_plain_object`. `keeps`: of what has no
    tensor in it that changes, the object itself is taken. The lengths in a PackedSequence stay: torch has them on the CPU.

    Raises
    ------
    Error
        A container that is to be copied contains itself.
    """
    return _Copies(convert, objects, keeps).of(value)


class _Copies:
    """What values have become. A class, because functions that call each other would live on as a cycle, with what they have seen."""

    def __init__(self, convert, objects, keeps):
        self._convert, self._objects, self._keeps = convert, objects, keeps
        self._done: dict[int, tuple[Any, Any]] = {}  # what each has become, beside itself, which lives as long so; itself while it is looked into
        self._entered: set[int] = set()
        self._inside_itself: set[int] = set()

    def of(self, one):
        key = id(one)
        if key in self._done:
            self._inside_itself.update({key} & self._entered)
            return self._done[key][1]
        parts = None if isinstance(one, torch.Tensor) else _parts(one, self._objects)
        if parts is None and not isinstance(one, torch.Tensor):
            return one
        self._done[key] = one, one
        self._entered.add(key)
        made = self._convert(one) if parts is None else self._with_parts(one, parts)
        self._entered.discard(key)
        if made is not one and key in self._inside_itself:
            raise Error(f"a {type(one).__name__} with tensors that are to be moved or copied contains itself; expected one that does not, or "
                        "tensors that are on the device already")
        self._done[key] = one, made
        return made

    def _with_parts(self, one, parts):
        stays = [1] if isinstance(one, PackedSequence) else []
        made = [part if i in stays else self.of(part) for i, part in enumerate(parts)]
        same = all(new is old for new, old in zip(made, parts))
        return one if same and (self._keeps or isinstance(one, (tuple, frozenset))) else _remade(one, made)


def _parts(value, objects):
    """What is in a value, in the order in which _remade() takes it; None: nobody looks into it."""
    if isinstance(value, (tuple, list, deque, set, frozenset)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    return list(vars(value).values()) if objects and is_plain_object(value) else None


def _remade(value, parts):
    """The same with other parts."""
    kind = type(value)
    if isinstance(value, tuple):
        made = kind(parts) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, parts)  # torch.return_types and the like
        if hasattr(value, "__dict__"):
            vars(made).update(vars(value))
        return made
    if isinstance(value, frozenset):
        return kind(parts)
    if isinstance(value, Mapping):
        items = dict(zip(value.keys(), parts))
        if not isinstance(value, (dict, UserDict)):  # a shallow copy may have the same items
            return kind(items)
        try:
            made = copy.copy(value)
            for key, part in items.items():
                made[key] = part
        except Exception:  # it refuses writes, as diffusers' FrozenDict
            return kind(items)
        return made
    made = copy.copy(value)
    if isinstance(value, (list, deque, set)):
        made.clear()
        (made.update if isinstance(value, set) else made.extend)(parts)
    else:
        vars(made).update(zip(vars(value), parts))
    return made


def tensors_in(value: Any, objects: bool = False) -> Iterator[torch.Tensor]:
    """The tensors in `value`: those that `map_tensors` finds, and those of dataclasses. A container that is in it twice counts once."""
    return _found(value, objects, {})


def _found(one, objects, seen):
    """`seen`: containers, each with its identity, that live as long so."""
    if isinstance(one, torch.Tensor):
        yield one
    elif id(one) not in seen:
        seen[id(one)] = one
        parts = _parts(one, objects)
        if parts is None and dataclasses.is_dataclass(one) and not isinstance(one, type):
            parts = [getattr(one, field.name, None) for field in dataclasses.fields(one)]
        for part in parts or ():
            yield from _found(part, objects, seen)


def is_plain_object(value: Any) -> bool:
    """Whether an object is its attributes and nothing besides: a new one of its class with the same `vars()` is equal to it."""
    kind = type(value)
    of_object = all(getattr(kind, name, None) is getattr(object, name, None)
                    for name in ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__del__"))
    return of_object and hasattr(value, "__dict__") and not any(vars(base).get("__slots__") for base in kind.__mro__)

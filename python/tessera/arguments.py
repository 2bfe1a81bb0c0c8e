"""Types and ranges of arguments, checked before they reach the compiled module: its own errors have a line for each of its signatures."""
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessera.errors import ConfigError


def text(value: Any, name: str) -> str:
    """A str that has a form in UTF-8. Raises TypeError or ValueError that names it, as all functions here do."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)}; expected a str")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is {value!r}; expected text that UTF-8 can hold, without halves of surrogate pairs") from None
    return value


def path(value: Any, name: str) -> str:
    """A file's or folder's name: str or PathLike."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} is {shown(value)}; expected a str or Path")
    found = text(os.fsdecode(value), name)
    if "\0" in found:
        raise ValueError(f"{name} is {found!r}; expected a name without NUL")
    return found


def texts(values: Any, name: str) -> list[str]:
    """Several of them: a list or another iterable, but not a str, which is an iterable of its characters."""
    if isinstance(values, (str, bytes)):
        raise TypeError(f"{name} is {shown(values)}; expected a list of str: give [{values!r}]")
    try:
        listed = list(values)
    except TypeError:
        raise TypeError(f"{name} is {shown(values)}; expected a list of str") from None
    return [text(value, f"{name}[{i}]") for i, value in enumerate(listed)]


def integer(value: Any, name: str, least: int, most: int = 2**63 - 1) -> int:
    """A whole number from `least` to `most`: an int, or a number of NumPy or tensor of integers that can be an index."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {shown(value)}; expected an int") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}; expected {least} to {most if most < 2**63 - 1 else '2^63 - 1'}")
    return number


def number(value: Any, name: str) -> float:
    """A real number as a float: an int, a float, or what converts to one and is no text."""
    if isinstance(value, (str, bytes)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"{name} is {shown(value)}; expected a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is {shown(value)}; expected a number that a float can hold") from None
    except (TypeError, RuntimeError):  # a complex one of NumPy, a tensor of several elements
        raise TypeError(f"{name} is {shown(value)}; expected a number") from None


def flag(value: Any, name: str) -> bool:
    """True or False, or a number or None in their place."""
    if not hasattr(type(value), "__bool__"):
        raise TypeError(f"{name} is {shown(value)}; expected True or False")
    return bool(value)


def tensor(value: Any, name: str) -> torch.Tensor:
    """A dense tensor with memory: not sparse, nested, quantized, named or on the meta device."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is {shown(value)}; expected a tensor")
    if not is_dense(value):
        raise TypeError(f"{name} is {described(value)}; expected a dense tensor with memory")
    return value


def is_dense(value: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie in memory, as `tensor` says."""
    return (value.layout is torch.strided and value.device.type != "meta" and not value.is_nested and not value.is_quantized
            and not _has_names(value))


def described(value: torch.Tensor) -> str:
    """What kind of tensor it is, for messages."""
    kinds = [name for name, holds in (("nested", value.is_nested), ("quantized", value.is_quantized), ("named", _has_names(value))) if holds]
    return f"a {' '.join([*kinds, 'tensor'])} on {value.device}, {value.dtype}, {value.layout}"


def _has_names(value):
    """torch 2.15 has no named tensors."""
    return hasattr(value, "has_names") and value.has_names()


def check_state(value: Any, keys: Sequence[str], of: str, where: str = "load_state_dict()") -> None:
    """Raises ConfigError where what a load_state_dict() was given lacks one of these keys, as the state of something else does."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: it is {shown(value)}; expected what state_dict() of {of} has returned")
    for key in keys:
        if key not in value:
            found = ", ".join(map(str, list(value)[:5])) + (", …" if len(value) > 5 else "")
            raise ConfigError(f"{where}: has no {key}, but {found or 'nothing'}; expected what state_dict() of {of} has returned")


def shown(value: Any) -> str:
    """A value and its type, on one line, for messages."""
    return f"{repr(value).splitlines()[0]:.60} (a {type(value).__name__})"

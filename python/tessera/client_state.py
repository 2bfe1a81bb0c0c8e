"""Python values as JSON that gives the same values back: what a checkpoint keeps of the caller, and what ranks exchange.

JSON has no tuples, no keys but strings, no NaN, and integers of 64 bits here. What it has stays as it is, so that other programs read
it. Each other value is an object with the key "$tessera", which names its type. Reading it runs no code of the file.
"""
import base64
import ctypes
import math
import sys
from collections import Counter, OrderedDict
from typing import Any

import torch

from tessera.errors import Error

_TYPE = "$tessera"
_MAX_DEPTH = 64  # of lists and dicts inside of each other; a checkpoint's manifest has a limit of its own
_MAX_BYTES = 1 << 20  # of one tensor or array
_NUMPY_KINDS = "biufcSUmM"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Unsupported(Error, TypeError):
    """A value that cannot be kept as it is; the message begins with its path."""


def encode(value: Any, path: str) -> Any:
    """What `json.dumps` takes and `decode` makes the same value of: equal and of the same type.

    None, bool, int, float (NaN and infinities too), complex, str, bytes, bytearray, list, tuple, set, frozenset, dict with any of these
    as keys, OrderedDict, Counter, numpy's scalars and arrays, and tensors on the CPU. Raises Unsupported for any other type, a derived
    one too, and names the value by `path`.
    """
    return _encode(value, path, 0)


def decode(value: Any) -> Any:
    """The value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TYPE not in value:
        return {key: decode(item) for key, item in value.items()}
    return _DECODERS[value[_TYPE]](value)


def _encode(value, path, depth):
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise Unsupported(f"{path.split('[')[0]} is more than {_MAX_DEPTH} levels deep, or contains itself; expected a flatter value")
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -(2 ** 63) <= value < 2 ** 63 else {_TYPE: "int", "value": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {_TYPE: "float", "value": repr(value)}
    if kind is str:
        return value if _is_unicode(value) else {_TYPE: "str", "value": _text(value.encode("utf-8", "surrogatepass"))}
    if kind is list:
        return [_encode(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if kind is dict:
        if all(type(key) is str and _is_unicode(key) for key in value) and _TYPE not in value:
            return {key: _encode(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
        return {_TYPE: "dict", "items": _items(value, path, depth)}
    if kind in (OrderedDict, Counter):
        return {_TYPE: kind.__name__, "items": _items(value, path, depth)}
    if kind in (tuple, set, frozenset):
        name = kind.__name__
        return {_TYPE: name, "value": [_encode(item, f"{path}[{i}]" if kind is tuple else f"an element of {path}", depth + 1)
                                       for i, item in enumerate(value)]}
    if kind in (bytes, bytearray):
        return {_TYPE: kind.__name__, "value": _text(_limited(value, len(value), path))}
    if kind is complex:
        return {_TYPE: "complex", "value": [value.real.hex(), value.imag.hex()]}
    if kind is torch.Tensor:
        return _encode_tensor(value, path)
    numpy = sys.modules.get("numpy")  # without it there are no values of its types
    if numpy and isinstance(value, (numpy.generic, numpy.ndarray)) and kind.__module__ == "numpy" and value.dtype.kind in _NUMPY_KINDS:
        _limited(value, value.nbytes, path)
        return {_TYPE: "array" if kind is numpy.ndarray else "scalar", "dtype": value.dtype.str, "shape": list(value.shape),
                "value": _text(value.tobytes())}
    raise Unsupported(f"{path} is of type {kind.__module__}.{kind.__qualname__}, which would not come back as it is; expected what JSON has, "
                      "tuples, sets, bytes, complex, numpy's values or CPU tensors (of an object give vars(object))")


def _encode_tensor(value, path):
    if value.device.type != "cpu" or value.layout is not torch.strided or value.requires_grad or str(value.dtype) not in _DTYPES \
            or value.is_quantized or value.is_conj() or value.is_neg():
        raise Unsupported(f"{path} is a tensor on {value.device}, {value.dtype}, {value.layout}{', that requires a gradient' * value.requires_grad}; "
                          "expected a dense one on the CPU without gradient: give tensor.detach().cpu()")
    _limited(value, value.nbytes, path)
    flat = value.contiguous().reshape(-1)
    return {_TYPE: "tensor", "dtype": str(value.dtype), "shape": list(value.shape),
            "value": _text(ctypes.string_at(flat.data_ptr(), value.nbytes))}


def _limited(value, size, path):
    if size > _MAX_BYTES:
        raise Unsupported(f"{path} has {size} bytes; expected at most {_MAX_BYTES}: save it in a file of its own")
    return value


def _items(value, path, depth):
    return [[_encode(key, f"the key {key!r:.60} of {path}", depth + 1), _encode(item, f"{path}[{key!r:.60}]", depth + 1)]
            for key, item in value.items()]


def _is_unicode(text):
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _text(data):
    return base64.b64encode(data).decode()


def _bytes(value):
    return base64.b64decode(value["value"])


def _pairs(value):
    return [(decode(key), decode(item)) for key, item in value["items"]]


def _decode_tensor(value):
    data = bytearray(_bytes(value))
    dtype = _DTYPES[value["dtype"]]
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"]).clone()


def _decode_array(value):
    import numpy

    return numpy.frombuffer(_bytes(value), dtype=numpy.dtype(value["dtype"])).reshape(value["shape"]).copy()


_DECODERS = {
    "int": lambda value: int(value["value"], 16),
    "float": lambda value: float(value["value"]),
    "str": lambda value: _bytes(value).decode("utf-8", "surrogatepass"),
    "bytes": _bytes,
    "bytearray": lambda value: bytearray(_bytes(value)),
    "complex": lambda value: complex(*map(float.fromhex, value["value"])),
    "tuple": lambda value: tuple(map(decode, value["value"])),
    "set": lambda value: set(map(decode, value["value"])),
    "frozenset": lambda value: frozenset(map(decode, value["value"])),
    "dict": lambda value: dict(_pairs(value)),
    "OrderedDict": lambda value: OrderedDict(_pairs(value)),
    "Counter": lambda value: Counter(dict(_pairs(value))),
    "tensor": _decode_tensor,
    "array": _decode_array,
    "scalar": lambda value: _decode_array(value)[()],
}

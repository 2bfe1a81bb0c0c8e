"""Python values as JSON that gives the same values back: what a checkpoint keeps of the caller and of modules, what ranks exchange.

JSON has no tuples, no keys but strings, no NaN, and integers of 64 bits here. What it has stays as it is, so that other programs read
it. Each other value is an object with the key "$tessera", which names its type. Reading it runs no code of the file.
"""
import base64
import ctypes
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from tessera import arguments, wrapper_tensors
from tessera.containers import is_plain_object
from tessera.errors import Error

_TYPE = "$tessera"
_MAX_DEPTH = 64  # of lists and dicts inside of each other; a checkpoint's manifest has a limit of its own
_MAX_BYTES = 1 << 20  # of one tensor or array inside of the JSON
_NUMPY_KINDS = "biufcSUmM"
_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, dict, OrderedDict, Counter, deque)}
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Unsupported(Error, TypeError):
    """A value that cannot be kept as it is; the message begins with its path."""


class _Blob:
    """What lies behind the JSON text: tensors and arrays, which are copied once, when all are known. `package`: whose classes' objects are
    taken."""

    def __init__(self, package: str):
        self.package = package
        self.parts: list[torch.Tensor] = []
        self.size = 0

    def append(self, value):
        """Returns where its bytes begin."""
        begin, self.size = self.size, self.size + value.nbytes
        self.parts.append(value)
        return begin


def encode(value: Any, path: str) -> Any:
    """What `json.dumps` takes and `decode` makes the same value of: equal and of the same type.

    None, bool, int, float (NaN and infinities too), complex, str, bytes, bytearray, list, tuple, set, frozenset, deque, dict with any of
    these as keys, OrderedDict, Counter, defaultdict of one of these types, torch's dtype, device, Size and Generator, numpy's scalars and
    arrays, and tensors on the CPU. Raises Unsupported for any other type, a derived one too, and names the value by `path`.
    """
    return _encode(value, path, 0, None)


def can_encode(value: Any) -> bool:
    """Whether `encode` takes the value."""
    try:
        encode(value, "")
    except Unsupported:
        return False
    return True


def encodable(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What of each dict `encode` takes."""
    return [{key: value for key, value in one.items() if can_encode(value)} for one in values]


def decode(value: Any) -> Any:
    """The value that `encode` was given."""
    return _decode(value, None)


def to_bytes(values: dict[str, Any], package: str = "") -> torch.Tensor:
    """The values as a tensor (n) uint8. Tensors and arrays may have any size, parameters and other devices' tensors are as tensors on the CPU,
    and of a tensor that is made of others (a quantized one of torchao) the parts are kept.

    Named tuples, members of an Enum, and objects that are their attributes (`containers.is_plain_object`), dataclasses too, are taken if
    their class is a module's of `package`, a name without dots.

    It holds the length of a JSON text (8 bytes, little-endian), the text, and the bytes of the tensors and arrays in it. Raises
    Unsupported, with the name, for a value that `encode` does not take.
    """
    blob = _Blob(package)
    encoded = {name: _encode(value, name, 0, blob) for name, value in values.items()}
    text = json.dumps({_TYPE: "values", "value": encoded}, allow_nan=False).encode()
    head = _uint8(len(text).to_bytes(8, "little") + text)
    result = torch.empty(len(head) + blob.size, dtype=torch.uint8, device="cpu")
    at = 0
    for part in (head, *blob.parts):
        result[at:at + part.nbytes] = _elements(part)
        at += part.nbytes
    return result


def from_bytes(data: torch.Tensor, package: str = "") -> dict[str, Any]:
    """The values that `to_bytes` was given. Raises Error for bytes that it has not made.

    No class is taken that is not in `package`, nothing is imported, and no method of a class is called.
    """
    begin = 8 + int.from_bytes(bytes(data[:8].tolist()), "little")
    document = json.loads(bytes(data[8:begin].tolist()))
    if document.get(_TYPE) != "values":
        raise Error("the values of get_extra_state() are not written as this version does; expected a checkpoint saved by it")
    return {name: _decode(value, _Source(data[begin:], package)) for name, value in document["value"].items()}


@dataclass(frozen=True)
class _Source:
    """What `from_bytes` has."""

    data: torch.Tensor
    package: str


def _decode(value, blob):
    if isinstance(value, list):
        return [_decode(item, blob) for item in value]
    if not isinstance(value, dict):
        return value
    if _TYPE not in value:
        return {key: _decode(item, blob) for key, item in value.items()}
    try:
        return _DECODERS[value[_TYPE]](value, blob)
    except Error:
        raise
    except Exception as error:
        raise Error(f"found {str(value):.100}, which is not written as a value of a type that JSON lacks ({type(error).__name__}: {error}); expected "
                    "a checkpoint that is not damaged") from None


def _encode(value, path, depth, blob):
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
        return [_encode(item, f"{path}[{i}]", depth + 1, blob) for i, item in enumerate(value)]
    if kind is dict:
        if all(type(key) is str and _is_unicode(key) for key in value) and _TYPE not in value:
            return {key: _encode(item, f"{path}[{key!r}]", depth + 1, blob) for key, item in value.items()}
        return {_TYPE: "dict", "items": _items(value, path, depth, blob)}
    if kind in (OrderedDict, Counter):
        return {_TYPE: kind.__name__, "items": _items(value, path, depth, blob)}
    if kind is defaultdict and (value.default_factory is None or value.default_factory in _FACTORIES.values()):
        return {_TYPE: "defaultdict", "of": getattr(value.default_factory, "__name__", None), "items": _items(value, path, depth, blob)}
    if kind in (tuple, set, frozenset, deque):
        return {_TYPE: kind.__name__, **({"maxlen": value.maxlen} if kind is deque else {}),
                "value": [_encode(item, f"{path}[{i}]" if kind in (tuple, deque) else f"an element of {path}", depth + 1, blob)
                          for i, item in enumerate(value)]}
    if kind in (bytes, bytearray):
        return {_TYPE: kind.__name__, "value": _text(_limited(value, len(value), path))}
    if kind is complex:
        return {_TYPE: "complex", "value": [value.real.hex(), value.imag.hex()]}
    if kind in (torch.dtype, torch.device):
        return {_TYPE: kind.__name__, "value": str(value).removeprefix("torch.")}
    if kind is torch.Size:
        return {_TYPE: "Size", "value": list(value)}
    if kind is torch.Generator:
        return {_TYPE: "Generator", "device": str(value.device), "state": _encode(value.get_state(), path, depth + 1, blob)}
    if kind is torch.Tensor or (kind is torch.nn.Parameter and blob is not None):
        return _encode_tensor(value, path, blob)
    if blob is not None and wrapper_tensors.is_wrapper(value) and all(type(size) is int for size in (*value.shape, *value.stride())):
        return {_TYPE: "wrapper", "class": wrapper_tensors.name_of(kind), "shape": list(value.shape), "strides": list(value.stride()),
                "parts": {name: _encode(part, f"{path}.{name}", depth + 1, blob) for name, part in wrapper_tensors.parts(value).items()},
                "context": _encode(value.__tensor_flatten__()[1], f"what {path} has besides tensors", depth + 1, blob)}
    numpy = sys.modules.get("numpy")  # without it there are no values of its types
    if numpy and kind is numpy.str_:  # as an array it would lose NULs at its end
        return {_TYPE: "str_", "value": _text(value.encode("utf-8", "surrogatepass"))}
    if numpy and kind is numpy.bytes_:
        return {_TYPE: "bytes_", "value": _text(_limited(value, len(value), path))}
    if numpy and (kind is numpy.ndarray or isinstance(value, numpy.generic)) and kind in (numpy.ndarray, value.dtype.type) \
            and value.dtype.kind in _NUMPY_KINDS:
        return {_TYPE: "array" if kind is numpy.ndarray else "scalar", "dtype": value.dtype.str, "shape": list(value.shape),
                **_placed(value, path, blob)}
    if blob is not None and _class_named(kind.__module__, kind.__qualname__, blob.package) is kind:
        of = {"module": kind.__module__, "class": kind.__qualname__}
        if isinstance(value, Enum) and value.name in kind.__members__:
            return {_TYPE: "enum", **of, "value": value.name}
        if _is_named_tuple(kind):
            return {_TYPE: "namedtuple", **of, "value": [_encode(item, f"{path}.{name}", depth + 1, blob) for name, item in zip(value._fields, value)]}
        if is_plain_object(value):
            return {_TYPE: "object", **of, "value": {name: _encode(item, f"{path}.{name}", depth + 1, blob) for name, item in vars(value).items()}}
    raise Unsupported(f"{path} is of type {kind.__module__}.{kind.__qualname__}, which would not come back as it is; expected what JSON has, "
                      "tuples, sets, bytes, complex, numpy's values or CPU tensors (of an object give vars(object))")


def _class_named(module, name, package):
    """A class that a module of `package` has, among those that are imported; or None."""
    found = sys.modules.get(module) if package and module.split(".")[0] == package else None
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) and found.__module__ == module else None


def _is_named_tuple(kind):
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple) and kind.__base__ is tuple


def _encode_tensor(value, path, blob):
    if blob is not None and arguments.is_dense(value):
        value = value.detach()
    if not arguments.is_dense(value) or value.requires_grad or str(value.dtype) not in _DTYPES \
            or (blob is None and (value.device.type != "cpu" or value.is_conj() or value.is_neg())):
        raise Unsupported(f"{path} is {arguments.described(value)}{', that requires a gradient' * value.requires_grad}; "
                          "expected a dense one on the CPU without gradient: give tensor.detach().cpu()")
    order = sorted(range(value.dim()), key=lambda d: -value.stride(d))
    permuted = blob is not None and not value.is_contiguous() and value.permute(order).is_contiguous()
    return {_TYPE: "tensor", "dtype": str(value.dtype), "shape": list(value.shape), **({"strides": list(value.stride())} if permuted else {}),
            **_placed(value, path, blob)}


def _placed(value, path, blob):
    """The bytes of a tensor's or array's elements: in the JSON, or their place behind it."""
    if blob is not None:
        return {"begin": blob.append(value), "bytes": value.nbytes}
    elements = _elements(_limited(value, value.nbytes, path))
    return {"value": _text(ctypes.string_at(elements.data_ptr(), elements.nbytes))}


def _elements(value):
    """The bytes of a dense tensor's or of an array's elements in their order, (n) uint8: a copy only where they do not lie so."""
    if not isinstance(value, torch.Tensor):
        return _uint8(value.tobytes())
    return value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _uint8(data):
    with torch.device("cpu"):  # whatever the user's default is
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _limited(value, size, path):
    if size > _MAX_BYTES:
        raise Unsupported(f"{path} has {size} bytes; expected at most {_MAX_BYTES}: save it in a file of its own")
    return value


def _items(value, path, depth, blob):
    return [[_encode(key, f"the key {key!r:.60} of {path}", depth + 1, blob), _encode(item, f"{path}[{key!r:.60}]", depth + 1, blob)]
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


def _data(value, blob):
    """A new tensor (n) uint8: what `_placed` was given."""
    return _uint8(_bytes(value)) if blob is None else blob.data[value["begin"]:value["begin"] + value["bytes"]].clone()


def _pairs(value, blob):
    return [(_decode(key, blob), _decode(item, blob)) for key, item in value["items"]]


def _decode_tensor(value, blob):
    tensor = _data(value, blob).view(_DTYPES[value["dtype"]]).reshape(value["shape"])
    if "strides" not in value:
        return tensor
    if 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, value["strides"], strict=True)) != tensor.numel():
        raise ValueError(f"strides {value['strides']} of the shape {list(tensor.shape)}")
    return torch.empty_strided(tensor.shape, value["strides"], dtype=tensor.dtype).copy_(tensor)  # sums of a column-major matrix have other bits


def _decode_wrapper(value, blob):
    parts = {name: _decode(part, blob) for name, part in value["parts"].items()}
    return wrapper_tensors.made(value["class"], parts, _decode(value["context"], blob), value["shape"], value["strides"])


def _decode_array(value, blob):
    return _data(value, blob).numpy().view(_numpy().dtype(value["dtype"])).reshape(value["shape"])


def _decode_generator(value, blob):
    generator = torch.Generator(value["device"])
    generator.set_state(_decode(value["state"], blob))
    return generator


def _decode_of_class(value, blob):
    """A member of an Enum, a named tuple or another object: made without its constructor."""
    kind = _class_named(value["module"], value["class"], "" if blob is None else blob.package)
    if kind is None:
        raise Error(f"{value['module']}.{value['class']}, the class of an object among the values, is in no module of this package that this program "
                    "has imported; expected it as it was when they were saved")
    if value[_TYPE] == "enum" and issubclass(kind, Enum):
        return kind.__members__[value["value"]]
    if value[_TYPE] == "namedtuple" and _is_named_tuple(kind) and len(value["value"]) == len(kind._fields):
        return tuple.__new__(kind, _decode(value["value"], blob))
    made = object.__new__(kind)
    if value[_TYPE] != "object" or not is_plain_object(made):
        raise TypeError(f"{kind.__qualname__} is another kind of class")
    vars(made).update((name, _decode(item, blob)) for name, item in value["value"].items())
    return made


def _numpy():
    import numpy

    return numpy


_DECODERS = {
    "int": lambda value, _: int(value["value"], 16),
    "float": lambda value, _: float(value["value"]),
    "str": lambda value, _: _bytes(value).decode("utf-8", "surrogatepass"),
    "bytes": lambda value, _: _bytes(value),
    "bytearray": lambda value, _: bytearray(_bytes(value)),
    "complex": lambda value, _: complex(*map(float.fromhex, value["value"])),
    "tuple": lambda value, blob: tuple(_decode(value["value"], blob)),
    "set": lambda value, blob: set(_decode(value["value"], blob)),
    "frozenset": lambda value, blob: frozenset(_decode(value["value"], blob)),
    "dict": lambda value, blob: dict(_pairs(value, blob)),
    "OrderedDict": lambda value, blob: OrderedDict(_pairs(value, blob)),
    "Counter": lambda value, blob: Counter(dict(_pairs(value, blob))),
    "defaultdict": lambda value, blob: defaultdict(None if value["of"] is None else _FACTORIES[value["of"]], _pairs(value, blob)),
    "deque": lambda value, blob: deque(_decode(value["value"], blob), value["maxlen"]),
    "enum": _decode_of_class,
    "namedtuple": _decode_of_class,
    "object": _decode_of_class,
    "Generator": _decode_generator,
    "dtype": lambda value, _: _DTYPES[f"torch.{value['value']}"],
    "device": lambda value, _: torch.device(value["value"]),
    "Size": lambda value, _: torch.Size(value["value"]),
    "tensor": _decode_tensor,
    "wrapper": _decode_wrapper,
    "array": _decode_array,
    "str_": lambda value, _: _numpy().str_(_bytes(value).decode("utf-8", "surrogatepass")),
    "bytes_": lambda value, _: _numpy().bytes_(_bytes(value)),
    "scalar": lambda value, blob: _decode_array(value, blob)[()],
}

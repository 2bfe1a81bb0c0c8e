"""What modules save besides tensors (`get_extra_state`) as bytes, and back: data alone, nothing of it is executed when it is read.

Eight bytes, little-endian: the length of a JSON text; the text; the bytes of the tensors in it, one after another. JSON has neither
tuples nor tensors nor keys that are no text: those are objects with one key that begins with "$".
"""
import json
import math
from collections import OrderedDict

import torch

from tessera.errors import Error

_PLAIN = (str, int, bool, type(None))


def to_bytes(states):
    """{name: value} as a tensor (n) uint8. Raises Error, with name and place, for a value that is no data."""
    tensors = []
    encoded = {name: _encode(value, name, tensors) for name, value in states.items()}
    text = json.dumps(encoded, allow_nan=False).encode()
    data = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return torch.cat([data, *tensors])


def from_bytes(data):
    """The inverse of `to_bytes`."""
    begin = 8 + int.from_bytes(bytes(data[:8].tolist()), "little")
    encoded = json.loads(bytes(data[8:begin].tolist()))
    position = [begin]
    return {name: _decode(value, data, position) for name, value in encoded.items()}


def _encode(value, place, tensors):
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [_encode(item, f"{place}[{i}]", tensors) for i, item in enumerate(value)]
    if kind in (tuple, set, frozenset):
        return {"$" + kind.__name__: [_encode(item, f"{place}[{i}]", tensors) for i, item in enumerate(value)]}
    if kind in (dict, OrderedDict):
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{place}[{key!r}]", tensors) for key, item in value.items()}
        pairs = [[_encode(key, place, tensors), _encode(item, f"{place}[{key!r}]", tensors)] for key, item in value.items()]
        return {"$dict" if kind is dict else "$OrderedDict": pairs}
    if kind in (bytes, bytearray):
        return {"$" + kind.__name__: value.hex()}
    if kind is complex:
        return {"$complex": [_encode(value.real, place, tensors), _encode(value.imag, place, tensors)]}
    if kind in (torch.dtype, torch.device):
        return {"$" + kind.__name__: str(value).removeprefix("torch.")}
    if kind is torch.Size:
        return {"$Size": list(value)}
    if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        tensors.append(plain.reshape(-1).view(torch.uint8))
        return {"$Tensor": {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}}
    raise Error(f"{place}: get_extra_state() gives a {kind.__module__}.{kind.__qualname__}, which a checkpoint does not hold, as it is "
                "loaded without executing it; expected numbers, text, bytes, dense tensors, and lists, tuples, sets and dicts of these")


def _decode(value, data, position):
    if isinstance(value, list):
        return [_decode(item, data, position) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: _decode(item, data, position) for key, item in value.items()}
    (kind, inner), = value.items()
    if kind == "$Tensor":
        return _decode_tensor(inner, data, position)
    if kind in ("$dict", "$OrderedDict"):
        made = {} if kind == "$dict" else OrderedDict()
        for key, item in inner:
            name = _decode(key, data, position)
            made[name] = _decode(item, data, position)
        return made
    if kind in ("$dtype", "$device", "$Size"):
        return {"$dtype": lambda: getattr(torch, inner), "$device": lambda: torch.device(inner), "$Size": lambda: torch.Size(inner)}[kind]()
    if kind in ("$bytes", "$bytearray"):
        return (bytes if kind == "$bytes" else bytearray).fromhex(inner)
    if kind == "$float":
        return float(inner)
    return {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$complex": lambda parts: complex(*parts)}[kind](
        _decode(inner, data, position))


def _decode_tensor(described, data, position):
    dtype = getattr(torch, described["dtype"])
    bytes_of_tensor = math.prod(described["shape"]) * dtype.itemsize
    begin = position[0]
    position[0] = begin + bytes_of_tensor
    return data[begin:position[0]].clone().view(dtype).view(described["shape"])

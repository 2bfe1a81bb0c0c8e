"""The tensors that a module holds besides its parameters and buffers, by name: those that are views of a parameter go stale."""
import bisect
import functools
import gc
import types
from collections import deque

import torch

# How many levels of containers and objects below a module's attribute are searched.
_DEPTH = 5
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype, torch.device)
_OF_MODULES = {"_parameters", "_buffers", "_modules"}


def tensors(module):
    """[(name, Tensor)]: in attributes, containers, arrays, closures of hooks, and attributes of objects that are none of torch's modules."""
    found, seen = [], set()
    for prefix, part in module.named_modules():
        seen.add(id(part))
        rewritten = _rewritten_by_hooks(part)
        for name, value in part.__dict__.items():
            if name not in _OF_MODULES and name not in rewritten:
                _search(value, f"{prefix}.{name}" if prefix else name, _DEPTH, found, seen)
    return found


def viewed_outside(module, parameters):
    """The name of a parameter whose memory a tensor outside of the module holds too; None where there is none."""
    known = {id(parameter) for _, parameter in parameters}
    known |= {id(part.__dict__.get(name)) for part in module.modules() for name in _rewritten_by_hooks(part)}
    ranges = sorted((_place(parameter), _place(parameter) + parameter.nbytes, name) for name, parameter in parameters if _place(parameter))
    for value in gc.get_objects():
        if not issubclass(type(value), torch.Tensor) or id(value) in known:
            continue
        place = _place(value)
        last = bisect.bisect(ranges, (place, float("inf"))) - 1
        if last >= 0 and ranges[last][0] <= place < ranges[last][1]:
            return ranges[last][2]
    return None


def _place(tensor):
    if type(tensor).__module__.startswith("torch._subclasses"):  # of a compiler: it has no memory, and asking for it warns
        return 0
    try:
        return tensor.data_ptr()
    except Exception:  # it has no memory: whatever its class raises
        return 0


def _rewritten_by_hooks(part):
    """Attributes that a hook computes anew before each forward, as torch.nn.utils.spectral_norm's and prune's do."""
    hooks = part.__dict__.get("_forward_pre_hooks", {}).values()
    return {getattr(hook, key) for hook in hooks for key in ("name", "_tensor_name") if isinstance(getattr(hook, key, None), str)}


def _search(value, name, depth, found, seen):
    if isinstance(value, _LEAVES) or depth == 0 or id(value) in seen:
        return
    if isinstance(value, torch.Tensor):
        found.append((name, value))
        return
    seen.add(id(value))
    for inner, inner_name in _inside(value, name):
        _search(inner, inner_name, depth - 1, found, seen)


def _inside(value, name):
    if type(value).__module__ == "numpy" and hasattr(value, "base"):
        return [(value.base, name)]  # a view of a tensor's memory has the tensor as its base
    if isinstance(value, torch.nn.Module):  # held without being a submodule
        return [(item, f"{name}.{key}") for kind in ("_buffers", "_modules") for key, item in value.__dict__.get(kind, {}).items()] + \
            [(item, f"{name}.{key}") for key, item in value.__dict__.items() if key not in _OF_MODULES] + \
            [(item, f"{name}.{key}") for key, item in value.__dict__.get("_parameters", {}).items()]
    if isinstance(value, dict):
        return [(item, f"{name}[{key!r}]") for key, item in list(value.items())]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [(item, f"{name}[{index}]") for index, item in enumerate(list(value))]
    if isinstance(value, functools.partial):
        return [(item, name) for item in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, types.MethodType):
        return [(value.__self__, name)]
    if isinstance(value, types.FunctionType):
        return [(_content(cell), name) for cell in value.__closure__ or ()] + [(item, name) for item in value.__defaults__ or ()]
    if isinstance(value, torch.optim.Optimizer):
        return []
    return [(item, f"{name}.{key}") for key, item in list(getattr(value, "__dict__", {}).items())]


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None

"""What a module computes, apart from its tensors: compared between ranks, which would otherwise train different models."""
import hashlib
import re
import sys
import types

import torch

from tessera import _engine


def check_same(module, comm):
    """Compare the module's program with the other ranks'. Collective. Raises CommError, the same on all ranks."""
    if comm.size > 1:
        parts = [(name, text.encode(errors="backslashreplace").decode()) for name, text in program_of(module)]
        _engine.check_same_program(comm, parts)


def program_of(module):
    """[(part of the module, what it is)]: of each submodule its class, what `extra_repr` says, and a digest of its class's code.

    Attributes are not compared, because a module may have ranks, devices, paths and times there. The code is that of the class and of
    its bases up to torch's, of functions of the same file that it calls, and the graph of a scripted or traced module.
    """
    parts, digests, scripted = [], {}, None
    for name, part in module.named_modules():
        where = name or "the model itself"
        if scripted is not None and name.startswith(scripted):
            continue  # in the graph of the whole
        if isinstance(part, torch.jit.ScriptModule):
            scripted = f"{name}." if name else ""
            parts.append((where, _stable(part.original_name)))
            parts += [(f"{scripted}forward", _graph_of(part))] if hasattr(part, "forward") else []
            continue
        kind = type(part)
        parts.append((where, _stable(f"{kind.__qualname__}({_extra_repr(part)})")))
        if isinstance(part, torch.fx.GraphModule):
            parts.append((f"the code of {where}", part.code))
            continue
        if kind not in digests:
            digests[kind] = _digest(_functions_of(kind))
        own = vars(part).get("forward")
        code = digests[kind] if own is None else _digest([own])
        if code:
            parts.append((f"the code of {where}", f"class {kind.__qualname__}, digest {code} (Python {_python_version()})"))
    return parts


def _python_version():
    return ".".join(map(str, sys.version_info[:2]))


def _extra_repr(part):
    try:
        return part.extra_repr()
    except Exception:  # it is the module's own code, and may need what is not there yet
        return ""


def _graph_of(script):
    text = re.sub(r" # [^\n]*", "", str(script.inlined_graph))  # places in files
    return _stable(re.sub(r"(\w+)\([^()]*(?:strides|device)=[^()]*\)", r"\1", text))  # shapes of the example that was traced


def _stable(text):
    """Without addresses, numbers of devices and of TorchScript's classes, and the order of sets."""
    text = re.sub(r" at 0x[0-9a-f]+|___torch_mangle_[0-9]+\.", "", text)
    text = re.sub(r"cuda:[0-9]+", "cuda", text)
    return re.sub(r"\{([^{}]*)\}", lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", text)


def _functions_of(kind):
    for base in kind.__mro__:
        if base.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        for _, value in sorted(vars(base).items()):
            yield value


def _digest(functions):
    """"" where there is no code of Python."""
    digest, seen = hashlib.sha256(), set()
    for function in functions:
        _add(function, digest, seen)
    return digest.hexdigest()[:16] if seen else ""


def _add(function, digest, seen):
    if isinstance(function, property):
        function = function.fget
    function = getattr(function, "__func__", function)  # of a method, staticmethod and classmethod
    if not isinstance(function, types.FunctionType) or function in seen:
        return
    seen.add(function)
    doc = function.__doc__
    _add_code(function.__code__, digest, doc)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if isinstance(value, (bool, int, float, str)):
            digest.update(repr(value).encode())
    _add(getattr(function, "__wrapped__", None), digest, seen)
    for cell in function.__closure__ or ():
        try:
            _add(cell.cell_contents, digest, seen)
        except ValueError:  # empty yet
            pass
    for name in function.__code__.co_names:
        other = function.__globals__.get(name)
        if getattr(other, "__module__", None) == function.__module__:
            _add(other, digest, seen)


def _add_code(code, digest, doc=None):
    digest.update(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames)).encode())
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            _add_code(value, digest)
        elif isinstance(value, frozenset):
            digest.update(repr(sorted(map(repr, value))).encode())
        elif doc is None or value != doc:
            digest.update(repr(value).encode())

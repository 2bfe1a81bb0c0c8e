"""The whole model out of an engine's shards: in memory and in a file."""
from collections import OrderedDict

import torch

from tessera import _engine, arguments, module_state, zero
from tessera.errors import Error
from tessera.zero import GatheredParameters

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CONVERTED = (*_DTYPES.values(), torch.float64)  # not those of fewer bits, whose bytes may mean something else


def gathered_state_dict(engine, only_rank=None):
    """See `Engine.state_dict`. Unit by unit, so that never more than one is in memory beside the copies."""
    engine._engine.check_usable()
    wanted = only_rank is None or engine.global_rank == only_rank
    copies = {}
    by_name = dict(engine.named_tensors)
    for names in engine._engine.units():
        parameters = [by_name[name] for name in names]
        with GatheredParameters(parameters):
            if wanted:
                copies.update((id(parameter), _copy(parameter)) for parameter in parameters)
    engine._engine.broadcast_buffers()
    state = OrderedDict()
    for name, value in engine.module.state_dict(keep_vars=True).items() if wanted else ():
        if id(value) in copies:
            state[name] = copies[id(value)]
        else:
            state[name] = _copy(value) if isinstance(value, torch.Tensor) else value
    return state


class _Ended:
    """In the place of an engine that destroy() has ended."""

    def __getattr__(self, name):
        raise Error("the engine was ended by destroy(); expected no further call: its module is a plain one again")


def give_back(engine):
    """See `Engine.destroy`."""
    if isinstance(engine._engine, _Ended):
        return
    by_name = dict(engine.named_tensors)
    copies = []
    for names in engine._engine.units():
        parameters = [by_name[name] for name in names]
        with GatheredParameters(parameters):
            copies.extend((parameter, parameter.detach().clone()) for parameter in parameters)
    engine._engine = _Ended()  # and its hooks are gone
    for parameter, value in copies:
        parameter.data = value
    zero.forget(engine)


def refuse_released(module):
    """From now on `state_dict()` of the module, or of a part of it, raises Error where it would return released parameters.

    What `torch.save` or `numpy()` read of them is an error too, which libtorch raises; this one comes first and on every rank.
    """
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):  # takes no hooks: libtorch refuses what is read of released parameters
            continue
        if part._parameters and _refuse_released not in part._state_dict_pre_hooks.values():
            part.register_state_dict_pre_hook(_refuse_released)


def _refuse_released(module, prefix, keep_vars):
    if keep_vars:  # nothing is read
        return
    for name, parameter in module._parameters.items():
        if parameter is not None and _engine.is_released(parameter):
            raise Error(f"state_dict(): {prefix}{name} is not in memory, because its shards are on all ranks: call engine.state_dict() or "
                        "engine.save_model(path), or call it inside of tessera.GatheredParameters(model)")


def save(engine, path, dtype=None, exclude_frozen=False):
    """See `Engine.save_model`."""
    path = arguments.path(path, "save_model(): path")
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(_DTYPES)}")
    tensors = []
    saved, others = module_state.saved_tensors(engine.module)
    if others and engine.global_rank == 0:
        _engine.log_warning(f"save_model(): {', '.join(others)}: not in {path}, which holds tensors alone; save_checkpoint() keeps it")
    for names, tensor, parameter in saved:
        if exclude_frozen and parameter and not tensor.requires_grad:
            continue
        own = _DTYPES[dtype] if dtype and tensor.dtype in _CONVERTED else tensor.dtype
        tensors.append((names[0], names[1:], parameter or tensor.detach(), own))
    engine._engine.save_model(path, tensors)


def _copy(tensor):
    return tensor.detach().to("cpu", copy=True)

"""The whole model out of an engine's shards: in memory and in a file."""
import contextlib
from collections import OrderedDict

import torch

from tessera import _engine, arguments, comm, module_state, zero
from tessera.errors import Error
from tessera.zero import GatheredParameters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CONVERTED = (*DTYPES.values(), torch.float64)  # not those of fewer bits, whose bytes may mean something else


def gathered_state_dict(engine, only_rank=None):
    """See `Engine.state_dict`. Unit by unit, so that never more than one is in memory beside the copies."""
    comm.check_usable(engine._engine, "state_dict()")
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
    held = next((name for name, parameter in engine.named_tensors if zero.is_held(parameter)), None)
    if held is not None:
        raise Error(f"destroy() inside of a GatheredParameters that holds {held}; leave it first")
    if engine.memory_record is not None:
        raise Error("destroy() inside of a memory_report of this engine; leave it first")
    if engine._engine.has_failed and (engine._engine.shards_parameters or engine._engine.step_was_refused):
        engine._engine.zero_grad()  # drops the gradients; collective, as gathering is. Elsewhere a rank may have failed alone, and its parameters are whole
    elif engine._engine.has_failed and engine.world_size == 1:
        with contextlib.suppress(Error):  # after a load that failed half-way
            engine._engine.zero_grad()
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


class ReleasedTensor(torch.Tensor):
    """In a state dict, in the place of a parameter that is not in memory: its shape and dtype. Reading it raises Error, on every rank alike.

    So libraries can ask a module for the keys of its state dict. What libtorch says of released memory comes later, and elsewhere.
    """

    @staticmethod
    def __new__(cls, parameter, name):
        tensor = torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        tensor._name_in_state_dict = name
        return tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function not in _ABOUT_A_TENSOR:
            _raise_released(args)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        _raise_released(args)

    def __repr__(self):
        return f"ReleasedTensor({self._name_in_state_dict}, {list(self.shape)}, {self.dtype})"


# What can be asked of a tensor without its elements.
_ABOUT_A_TENSOR = {
    getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "nelement", "ndimension", "element_size", "stride", "is_floating_point",
                                             "is_complex", "is_contiguous", "storage_offset", "__len__")} | {
    getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_meta",
                                                     "is_sparse", "is_quantized", "is_nested", "is_leaf", "nbytes", "itemsize", "grad_fn", "grad")}


def _raise_released(values):
    name = next((value._name_in_state_dict for value in _flat(values) if isinstance(value, ReleasedTensor)), "a parameter")
    raise Error(f"state_dict(): {name} is not in memory, because its shards are on all ranks: call engine.state_dict() or "
                "engine.save_model(path), or call it inside of tessera.GatheredParameters(model)")


def _flat(values):
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


_save_to_state_dict = torch.nn.Module._save_to_state_dict


def _save_what_is_in_memory(module, destination, prefix, keep_vars):
    """In the place of torch.nn.Module's: where a parameter of the module itself is released, a ReleasedTensor. `detach()` of it, which
    torch's calls, would gather it, which is collective."""
    released = [] if keep_vars else [name for name, parameter in module._parameters.items()
                                     if parameter is not None and _engine.is_released(parameter)]
    if not released:
        _save_to_state_dict(module, destination, prefix, keep_vars)
        return
    saved = {}
    _save_to_state_dict(module, saved, prefix, True)
    for key, value in saved.items():
        name = key.removeprefix(prefix)
        if name in released:
            value = ReleasedTensor(value, key)
        elif name in module._parameters or name in module._buffers:
            value = value.detach()
        destination[key] = value


def refuse_released():
    """From now on the state dict of a module has a ReleasedTensor in the place of each parameter that is not in memory."""
    torch.nn.Module._save_to_state_dict = _save_what_is_in_memory


def save(engine, path, dtype=None, exclude_frozen=False):
    """See `Engine.save_model`."""
    def prepare():
        engine._engine.check_usable()
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
        saved, others = module_state.saved_tensors(engine.module)
        if others and engine.global_rank == 0:
            _engine.log_warning(f"save_model(): {', '.join(others)}: not in {path}, which holds tensors alone; save_checkpoint() keeps it")
        tensors = [(names[0], names[1:], parameter or tensor.detach(), DTYPES[dtype] if dtype and tensor.dtype in _CONVERTED else tensor.dtype)
                   for names, tensor, parameter in saved if not (exclude_frozen and parameter and not tensor.requires_grad)]
        return (arguments.path(path, "path"), tensors), {"dtype": dtype, "exclude_frozen": bool(exclude_frozen)}

    engine._engine.save_model(*comm.agreed("save_model()", prepare))


def _copy(tensor):
    return tensor.detach().to("cpu", copy=True)

"""A module's parameters and what else it holds, by name: what the engine is told of a model."""
import weakref

import torch

from tessera import json_values


def named_parameters(module):
    """All names of all parameters, a tied one under each: [(name, Parameter)] in the order of registration."""
    return [(name, parameter) for name, parameter in module.named_parameters(remove_duplicate=False)]


class ModuleState:
    """What the engine asks of a module at each use: buffers and extra state may be others then than before.

    The engine holds this object, so it refers to the module weakly: a cycle through the engine would never be collected.
    """

    def __init__(self, module):
        self._module = weakref.ref(module)

    def buffers(self):
        """[(name, Tensor or None, persistent)], in the order of a state dict, a shared buffer under each name."""
        return [(prefix + name, buffer, name not in part._non_persistent_buffers_set)
                for prefix, part in _parts(self._module()) for name, buffer in part._buffers.items()]

    def can_assign(self, name):
        """Whether the module can hold, or lose, a buffer of this name."""
        part, last = self._find(name)
        return part is not None and (last in part._buffers or not hasattr(part, last))

    def assign(self, name, tensor):
        """Register a buffer, or give it another tensor, or None."""
        part, last = self._find(name)
        if last in part._buffers:
            part._buffers[last] = tensor
        else:
            part.register_buffer(last, tensor)

    def remove(self, name):
        """Remove a buffer, if it is there."""
        part, last = self._find(name)
        part._buffers.pop(last, None)

    def extra_state_names(self):
        """The keys of a state dict of what modules save besides tensors."""
        return [name for name, _ in _with_extra_state(self._module())]

    def extra_state(self):
        """All of it as data. Raises Error, with the name, for what is no data."""
        return json_values.to_bytes({name: part.get_extra_state() for name, part in _with_extra_state(self._module())})

    def set_extra_state(self, data):
        """Give each module what `extra_state` has returned."""
        parts = dict(_with_extra_state(self._module()))
        for name, value in json_values.from_bytes(data).items():
            if name in parts:
                parts[name].set_extra_state(value)

    def set_extra_state_of(self, name, value):
        """Give one module a tensor."""
        dict(_with_extra_state(self._module()))[name].set_extra_state(value)

    def _find(self, name):
        prefix, _, last = name.rpartition(".")
        try:
            return self._module().get_submodule(prefix), last
        except AttributeError:
            return None, last


def _parts(module, prefix=""):
    """(prefix, module) of all modules, one that is shared under each name, as `state_dict` goes through them."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _parts(child, prefix + name + ".")


def _with_extra_state(module):
    """(key in a state dict, module) of those that save more than tensors."""
    none = torch.nn.Module.get_extra_state
    return [(prefix + "_extra_state", part) for prefix, part in _parts(module)
            if getattr(type(part), "get_extra_state", none) is not none]


def parameter_ids(module):
    """The identities of the module's parameters, in order; two calls compare equal while it has the same ones.

    Goes through the modules' own dictionaries, without names: some 0.3 microseconds a module, so that every step can call it.
    """
    found = []
    _collect(module, found)
    return found


def _collect(module, found):
    attributes = module.__dict__
    found.extend(map(id, attributes["_parameters"].values()))
    for child in attributes["_modules"].values():
        if child is not None:
            _collect(child, found)


def saved_tensors(module):
    """The tensors of `module.state_dict()`, and the names of what else it has: extra state that is no tensor.

    The tensors are [(names, tensor, is_buffer)], a tied one once with all its names; the module's own, nothing is read.
    """
    parameters = {id(parameter) for parameter in module.parameters()}
    saved, others = {}, []
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            others.append(name)
        elif id(value) in saved:
            saved[id(value)][0].append(name)
        else:
            saved[id(value)] = ([name], value, id(value) not in parameters)
    return list(saved.values()), others

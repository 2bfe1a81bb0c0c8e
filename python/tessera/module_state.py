"""A module's parameters and what else it holds, by name: what the engine is told of a model."""
import weakref

import torch

from tessera import failures, json_values
from tessera.errors import Error


def named_parameters(module):
    """All names of all parameters, a tied one under each: [(name, Parameter)] in the order of registration."""
    return [(name, parameter) for name, parameter in module.named_parameters(remove_duplicate=False)]


def first_names(named_parameters):
    """{identity of a parameter: its name, a tied one's first}."""
    names = {}
    for name, parameter in named_parameters:
        names.setdefault(id(parameter), name)
    return names


class ModuleState:
    """What the engine asks of a module at each use: buffers and extra state may be others then than before.

    The engine holds this object, so it refers to the module weakly: a cycle through the engine would never be collected.
    """

    def __init__(self, module):
        self._module = weakref.ref(module)
        self._own_entries = {}  # that were loaded and not given to the module yet

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
        """The keys of a state dict of what modules save besides parameters and buffers."""
        return [name for name, _ in _with_extra_state(self._module())] + list(_own_entries(self._module()))

    def extra_state(self):
        """All of it as data. Raises Error, with the name, for what is no data."""
        values = {name: part.get_extra_state() for name, part in _with_extra_state(self._module())}
        return json_values.to_bytes({**values, **_own_entries(self._module())})

    def set_extra_state(self, data):
        """Give each module what `extra_state` has returned."""
        self._set(json_values.from_bytes(data))

    def set_extra_state_of(self, name, value):
        """Give one module a tensor."""
        self._set({name: value})

    def _set(self, values):
        parts, own = dict(_with_extra_state(self._module())), {}
        for name, value in values.items():
            if name in parts:
                try:
                    parts[name].set_extra_state(value)
                except Exception as error:
                    raise Error(f"{name.removesuffix('_extra_state')}set_extra_state(): {failures.describe(error)}") from error
            else:
                own[name] = value
        self._own_entries.update(own)  # for finish_load(), as hooks of modules may read parameters

    def finish_load(self):
        """The end of what loads parameters: modules take their own entries, and hooks for after loading are called. Hooks may read parameters."""
        module, own = self._module(), dict(self._own_entries)
        self._own_entries.clear()
        if own:
            module.load_state_dict(own, strict=False)
            return
        for part in module.modules():
            for hook in getattr(part, "_load_state_dict_post_hooks", {}).values():
                hook(part, torch.nn.modules.module._IncompatibleKeys([], []))

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


def _own_entries(module):
    """{key in a state dict: value} of what `_save_to_state_dict` or a hook of the module's own adds, which is no parameter or buffer."""
    if not any(_saves_more(part) for part in module.modules()):
        return {}
    names = {name for name, _ in named_parameters(module)} | {prefix + name for prefix, part in _parts(module) for name in part._buffers}
    names |= {name for name, _ in _with_extra_state(module)}
    held = {id(tensor) for part in module.modules() for tensor in (*part._parameters.values(), *part._buffers.values())}
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if name not in names and id(value) not in held}


def _saves_more(part):
    return not isinstance(part, torch.jit.ScriptModule) and (
        part._state_dict_hooks or type(part)._save_to_state_dict is not torch.nn.Module._save_to_state_dict)


def refuse_load_hooks(module, call):
    """Raise Error where `load_state_dict` would change a file's tensors before it takes them, which `call` does not."""
    for name, part in module.named_modules():
        for hook in getattr(part, "_load_state_dict_pre_hooks", {}).values():
            function = getattr(hook, "hook", hook)
            function = getattr(function, "func", function)
            if not getattr(function, "__module__", "").startswith("torch."):
                raise Error(f"{call}: {name or 'the module'} has a hook ({getattr(function, '__qualname__', function)}) that changes a state "
                            "dict before it is loaded, and no state dict is made here; expected none. Call module.load_state_dict() inside of "
                            "tessera.GatheredParameters(module, modifier_rank=0)")


def names_in_files(module):
    """[(key in a state dict, name in the module)] of the parameters whose names differ, because hooks of the module change keys."""
    if not any(_saves_more(part) for part in module.modules()):
        return []
    renamed = [(name, parameter) for names, _, parameter in saved_tensors(module)[0] if parameter and parameter not in names for name in names]
    return sorted(renamed, key=lambda pair: -len(pair[0]))  # a longer one first: they are matched as prefixes


def parameter_ids(module):
    """The identities of the module's parameters, in order; two calls compare equal while it has the same ones.

    Goes through the modules' own dictionaries, without names: some 0.3 microseconds a module, so that every step can call it.
    """
    found = []
    _collect(module, found)
    return found


def _collect(module, found):
    attributes = module.__dict__
    parameters, children = attributes.get("_parameters"), attributes.get("_modules")
    if parameters is None or children is None:  # of TorchScript: they are properties
        parameters, children = module._parameters, module._modules
    found.extend(map(id, parameters.values()))
    for child in children.values():
        if child is not None:
            _collect(child, found)


def saved_tensors(module):
    """The tensors of `module.state_dict()`, and the names of what else it has: extra state that is no tensor.

    The tensors are [(names, tensor, parameter)], a tied one once with all its names; the module's own, nothing is read. `parameter`: its
    name in the module, which hooks may have changed in the state dict; None: it is none.
    """
    parameters = {id(parameter): name for name, parameter in reversed(named_parameters(module))}
    saved, others = {}, []
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            others.append(name)
        elif id(value) in saved:
            saved[id(value)][0].append(name)
        else:
            saved[id(value)] = ([name], value, parameters.get(id(value)))
    return list(saved.values()), others

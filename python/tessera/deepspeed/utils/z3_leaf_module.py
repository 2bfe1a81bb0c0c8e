"""`deepspeed.utils.z3_leaf_module`: modules whose parameters DeepSpeed gathers at once.

So do they here, so that ranks may use different parameters of one (docs/python.md, Branches).
"""
from collections.abc import Iterable

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from tessera import leaf_modules

__all__ = ["get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix",
           "unset_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter"]
_MARK = leaf_modules.MARK
_parameters = WeakIdKeyDictionary()  # of modules that are marked


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module was marked."""
    return getattr(model, _MARK, False)


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether the parameter was in a module when that was marked."""
    return model in _parameters


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` that were marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take its mark away."""
    setattr(model, _MARK, bool(flag))
    for parameter in model.parameters():
        if flag:
            _parameters[parameter] = True
        else:
            _parameters.pop(parameter, None)
    leaf_modules.attach(model)


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True) -> list[nn.Module]:
    """Mark the modules of these classes, or classes' names, and return them. Raises ValueError for none, unless told not to."""
    return _mark_classes("set_z3_leaf_modules", model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True) -> list[nn.Module]:
    """Take the marks of these away, and return them. Raises ValueError for none, unless told not to."""
    return _mark_classes("unset_z3_leaf_modules", model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(model: nn.Module, module_names: Iterable[str], flag: bool = True,
                                raise_if_not_found: bool = True) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in `named_modules()`. Returns them, and the names that none has, which are a ValueError unless told not to."""
    named = dict(model.named_modules())
    names = list(module_names)
    found, missing = [named[name] for name in names if name in named], [name for name in names if name not in named]
    return _marked("set_z3_leaf_modules_by_name", model, found, missing, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True,
                                  raise_if_not_found: bool = True) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their names. Returns them, and the ends that none has, which are a ValueError unless told not to."""
    ends = list(module_name_suffixes)
    found = [module for name, module in model.named_modules() if name.endswith(tuple(ends))] if ends else []
    missing = [end for end in ends if not any(name.endswith(end) for name, _ in model.named_modules())]
    return _marked("set_z3_leaf_modules_by_suffix", model, found, missing, flag, raise_if_not_found)


def _mark_classes(call, model, classes, flag, raise_if_not_found):
    if isinstance(classes, str) or not all(isinstance(one, (type, str)) for one in classes):
        raise TypeError(f"{call}(): leaf_module_classes is {classes!r}; expected a list of classes or their names")
    found = leaf_modules.matching(model, classes)
    if not found and raise_if_not_found:
        shown = ", ".join(one if isinstance(one, str) else one.__qualname__ for one in classes)
        raise ValueError(f"{call}(): no module of the model is one of {shown}")
    return _marked(call, model, found, [], flag, raise_if_not_found)[0]


def _marked(call, model, found, missing, flag, raise_if_not_found):
    if missing and raise_if_not_found:
        raise ValueError(f"{call}(): the model has no module {', '.join(missing)}")
    for module in found:
        set_z3_leaf_module(module, flag)
    leaf_modules.attach(model)  # of one without a forward it is the module around it that is entered
    return found, missing

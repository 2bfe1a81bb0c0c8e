"""Param groups that Python has, as a configuration: of a torch optimizer, or of `model_parameters`.

A group is told by the names of its parameters, which are found by identity, and are not patterns.
"""
import difflib
from collections.abc import Iterable
from typing import Any

import torch

from tessera import _engine, comm, optim
from tessera.errors import ConfigError
from tessera.module_state import first_names
from tessera.optimizer_options import HYPERS, OF_ALL_GROUPS, NotBuiltIn, Options, is_option
from tessera.optimizer_trial import is_replaced
from tessera.whole_optimizer import WholeOptimizer


class Translation:
    """What an engine is told of param groups that Python has.

    Attributes
    ----------
    section : dict or None
        The section `optimizer` of the configuration; None: as it is.
    untrained : list of str
        Trainable parameters in no group. They keep their values.
    groups : list of dict, or None
        Param groups that `initialize` was given, without an optimizer.
    whole : WholeOptimizer or None
        The optimizer, where it runs as it is.
    client : torch.optim.Optimizer or None
        The configuration's, of a type that runs so.
    """

    def __init__(self, section: dict[str, Any] | None = None, untrained: Iterable[str] = (),
                 groups: list[dict[str, Any]] | None = None, whole: WholeOptimizer | None = None) -> None:
        self.section = section
        self.untrained = list(untrained)
        self.groups = groups
        self.whole = whole
        self.client: torch.optim.Optimizer | None = None

    def add_whole(self, config: Any, section: dict[str, Any], named_parameters: list[tuple[str, torch.nn.Parameter]], world_size: int) -> None:
        """Make the optimizer of a configuration's section whose type is in `optim.WHOLE`. `config`: what the section is of, for its groups."""
        names = first_names(named_parameters)
        trained = [(name, p) for name, p in named_parameters
                   if p.requires_grad and names[id(p)] == name and name not in self.untrained]
        options = [section["params"], *({**section["params"], **group} for group in section["param_groups"])]
        groups = [({key: one[key] for key in section["params"]}, []) for one in options]
        for (name, parameter), group in zip(trained, _engine.group_indices(config, [name for name, _ in trained])):
            groups[group][1].append((name, parameter))
        self.client = optim.of_configuration(section["type"], groups)
        filled = iter(self.client.param_groups)
        for given in self.groups or []:  # with keys of the caller's own
            if given["params"]:
                group = next(filled)
                group.update((key, value) for key, value in given.items() if key not in group)
        self.whole = WholeOptimizer(self.client, named_parameters, world_size, section["type"])


def translate(optimizer: torch.optim.Optimizer, named_parameters: list[tuple[str, torch.nn.Parameter]], world_size: int) -> Translation:
    """A torch optimizer as a configuration. Its groups are told by their parameters' names, which are not patterns. Collective.

    One of a class that `optimizer_options` has no table for, with an option that the formulas here lack, or with another step(), runs as it is.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its states are not looked at.
    named_parameters : list of (str, Parameter)
        The model's, by which the groups' tensors are named.
    world_size : int
        The number of ranks.

    Raises
    ------
    ConfigError
        A tensor that is not the model's; an optimizer that calls a closure.
    """
    def prepare():
        try:
            return _translated(optimizer, named_parameters), {}
        except NotBuiltIn:
            return None, {}

    translation = comm.agreed("initialize()", prepare)
    if all(comm.all_gather(translation is not None, "kind of the optimizer")):  # what one rank finds otherwise runs as it is on all
        return translation
    options = Options.of_whole(optimizer)
    groups = [(_names_of(group["params"], named_parameters), options.values(group, f"{options.name}, param group {i}"))
              for i, group in enumerate(optimizer.param_groups)]
    whole = WholeOptimizer(optimizer, named_parameters, world_size)
    return Translation(_section(options.type, groups), _untrained(groups, named_parameters), whole=whole)


def _translated(optimizer, named_parameters):
    options = Options.of(optimizer)
    groups = [(_names_of(group["params"], named_parameters), options.values(group, f"{options.name}, param group {i}"))
              for i, group in enumerate(optimizer.param_groups)]
    if is_replaced(optimizer):
        raise NotBuiltIn(f"{options.name}: its step() is not the one of its package")
    return Translation(_section(options.type, groups), _untrained(groups, named_parameters))


def states_of(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Torch's state_dict of one that has taken steps or loaded some, else None. Collective.

    Raises
    ------
    ConfigError
        Ranks have other states.
    """
    def mark(value):
        return _engine.hash_of(value.detach().cpu().contiguous()) if isinstance(value, torch.Tensor) else \
            value if value is None or type(value) in (bool, int, float) else type(value).__name__

    found = None
    if any(float(state.get("step") or 0) > 0 or "step" not in state for state in optimizer.state.values()):
        found = torch.optim.Optimizer.state_dict(optimizer)
    marks = [[str(index), key, mark(value)] for index, state in found["state"].items() for key, value in state.items()] if found else []
    if any(theirs != marks for theirs in comm.all_gather(marks, "states of the optimizer")):
        raise ConfigError("the optimizer's states differ between ranks; expected the same on all, as load_state_dict() of one file gives them")
    return found


def translate_groups(model_parameters: list[Any] | None, named_parameters: list[tuple[str, torch.nn.Parameter]],
                     section: dict[str, Any]) -> Translation:
    """`model_parameters` of `initialize`, beside the configuration's `section`, with all its values. Of Muon also what parameters say:
    `use_muon=False` leaves one to AdamW, as in DeepSpeed.

    Raises
    ------
    ConfigError
        As `translate`; a parameter in two groups; an option that the configuration's optimizer has not.
    """
    marked = set()
    if section["type"] == "Muon":  # DeepSpeed's mark of a parameter
        marked = {name for name, parameter in named_parameters if getattr(parameter, "use_muon", None) is False}
    if model_parameters is None:
        model_parameters = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    if not any(isinstance(item, dict) for item in model_parameters):
        names = _names_of(model_parameters, named_parameters)
        if not marked.intersection(names):
            return Translation(None, _untrained([(names, {})], named_parameters))
        if section["param_groups"]:
            raise ConfigError("parameters have use_muon=False, and the configuration has optimizer.param_groups; expected \"use_muon\": false in a "
                              "group there, or no groups")
        parameters = dict(named_parameters)
        model_parameters = [{"params": [parameters[name] for name in names if name not in marked]},
                            {"params": [parameters[name] for name in names if name in marked], "use_muon": False}]
    if section["param_groups"]:
        raise ConfigError("model_parameters has param groups, and so has optimizer.param_groups of the configuration; expected one of the "
                          "two")
    type_ = section["type"]
    options = Options.of_type(type_)
    groups, shown, group_of = [], [], {}
    for i, given in enumerate(model_parameters):
        where = f"model_parameters[{i}]"
        if not isinstance(given, dict) or "params" not in given:
            raise ConfigError(f"{where} is {given!r:.60}; expected a dict with \"params\", as the other elements are")
        tensors = _tensors_in(given["params"])
        names = _names_of(tensors, named_parameters)
        for name in names:
            if group_of.setdefault(name, i) != i:
                raise ConfigError(f"parameter {name} is in model_parameters[{group_of[name]}] and {where}; expected it in one group")
        _check_keys(given, type_, where)
        values = {key: section["params"][key] for key in HYPERS[type_]}
        values.update(options.values(given, where))
        if type_ == "Muon" and "lr" in given and "adam_lr_ratio" not in given:
            values["adam_lr_ratio"] = 1.0  # as the configuration has it: a group's lr is that of all its parameters
        for name in sorted(marked.intersection(names)) if values.get("use_muon", False) else ():
            raise ConfigError(f"{where}: parameter {name} has use_muon=False; expected it in a group with \"use_muon\": False")
        groups.append((names, values))
        shown.append({**given, "params": list(dict.fromkeys(tensors))})
    translated = _section(type_, groups)
    translated["params"] = {**section["params"], **translated["params"]}  # with the keys that are not a group's
    return Translation(translated, _untrained(groups, named_parameters), shown)


def _section(type_, groups):
    filled = [(names, values) for names, values in groups if names]
    if not filled:
        raise ConfigError("the optimizer has no parameters; expected some of the model's")
    params = dict(filled[0][1])
    section = {"type": type_, "params": params,
               "param_groups": [{"parameters": names, **{key: value for key, value in values.items()
                                                         if value != params.get(key) or key == "adam_lr_ratio"}}
                                for names, values in filled[1:]]}
    if type_ == "Adam":
        params["adam_w_mode"] = False
    return section


def _check_keys(group, type_, where):
    """What a group may hold besides options: whatever has another name than an option."""
    for key in group:
        if key in OF_ALL_GROUPS.get(type_, ()):
            raise ConfigError(f"{where}: {key} is not a group's option; expected it in optimizer.params of the configuration, and in groups "
                              f"{', '.join(option for option in HYPERS[type_] if option not in OF_ALL_GROUPS[type_])}")
        if key in HYPERS[type_] or key in ("params", "param_names"):
            continue
        near = difflib.get_close_matches(str(key), HYPERS[type_], n=1, cutoff=0.8)
        if near or (is_option(key) and group[key] not in (False, None)):
            hint = f" (did you mean \"{near[0]}\"?)" if near else ""
            raise ConfigError(f"{where}: {type_} has no option {key}{hint}; expected {', '.join(HYPERS[type_])}, or keys of your own")


def _tensors_in(tensors):
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return [item[1] if isinstance(item, tuple) else item for item in given]


def _names_of(tensors, named_parameters):
    names = first_names(named_parameters)
    found = {}
    for tensor in _tensors_in(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"the optimizer's parameters have {tensor!r:.60} (a {type(tensor).__name__}); expected tensors")
        if id(tensor) not in names:
            raise ConfigError(f"the optimizer has a tensor of shape {list(tensor.shape)} that is not a parameter of the model")
        found[names[id(tensor)]] = True
    return list(found)


def _untrained(groups, named_parameters):
    """Trainable parameters in no group, a tied one by all its names."""
    grouped = {name for names, _ in groups for name in names}
    first = first_names(named_parameters)
    return [name for name, parameter in named_parameters if parameter.requires_grad and first[id(parameter)] not in grouped]

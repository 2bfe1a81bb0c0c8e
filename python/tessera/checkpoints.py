"""`Engine.save_checkpoint` and `load_checkpoint`: their arguments, and what Python has in a checkpoint beside the engine's state."""
import copy
import json
import numbers
import os
from collections.abc import Callable
from typing import Any

import torch

from tessera import _engine, arguments, comm, failures, json_values
from tessera.errors import CheckpointError, Error
from tessera.lr_scheduler import needs_arguments
from tessera.module_state import first_names

# Keys of the client state of a checkpoint that are the package's own.
_GROUPS_STATE = "tessera.param_groups"
_SCHEDULER_STATE = "tessera.lr_scheduler"
_SCHEDULER_CLASS = "tessera.lr_scheduler_class"  # of torch's
_LOADER_STATE = "tessera.dataloader"
_SAMPLES = "tessera.global_samples"
_ENCODING = "tessera.encoding"  # 1: values are encoded by json_values.py; absent: they are plain JSON

_MAX_LISTED = 20
_OF_SOME_VERSIONS = {"_get_lr_called_within_step", "_is_initial", "verbose"}  # attributes of torch's schedulers that say nothing
_OF_SCHEDULES = {"lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}  # values of groups that torch's schedulers write
_BY_PLACE = ("_schedulers", "base_lrs")  # lists of torch's schedulers, of which another length is another schedule


def save(engine: Any, save_dir: Any, tag: Any, state: Any, save_latest: bool, exclude_frozen_parameters: bool) -> str:
    """See `Engine.save_checkpoint`."""
    def prepare():
        engine._engine.check_usable()
        values = {"client_state": {} if state is None else state, _GROUPS_STATE: json_values.encodable(engine.optimizer.values()),
                  _SAMPLES: engine.global_samples, _ENCODING: 1}
        if engine._steps_lr_scheduler:
            values[_SCHEDULER_STATE] = engine.lr_scheduler.state_dict()
            if _is_torchs(engine.lr_scheduler):
                values[_SCHEDULER_CLASS] = type(engine.lr_scheduler).__name__
        if hasattr(engine.training_dataloader, "state_dict"):
            values[_LOADER_STATE] = engine.training_dataloader.state_dict()
        encoded = {key: json_values.encode(value, _name_of(key)) for key, value in values.items()}
        folder, name = folder_of(save_dir, "save_dir"), _tag_of(tag)
        flags = [arguments.flag(save_latest, "save_latest"), arguments.flag(exclude_frozen_parameters, "exclude_frozen_parameters")]
        return (folder, name or "", json.dumps(encoded, allow_nan=False), *flags), {"tag": name}

    return engine._engine.save_checkpoint(*comm.agreed("save_checkpoint()", prepare))


def load(engine: Any, load_dir: Any, tag: Any, load_module_strict: bool, load_optimizer_states: bool, load_lr_scheduler_states: bool,
         load_module_only: bool, custom_load_fn: Callable[..., Any] | None, allow_partial_load: bool) -> tuple[str, Any]:
    """See `Engine.load_checkpoint`."""
    def prepare():
        given = {"load_module_strict": load_module_strict, "load_optimizer_states": load_optimizer_states,
                 "load_lr_scheduler_states": load_lr_scheduler_states, "load_module_only": load_module_only, "allow_partial_load": allow_partial_load}
        flags = {name: arguments.flag(value, name) for name, value in given.items()}
        if custom_load_fn is not None:
            raise NotImplementedError("custom_load_fn: parameters are read from the shards of a checkpoint, and no state_dict of all is made; "
                                      "expected None. `tessera consolidate` writes that state_dict to a file, from which parameters can be set "
                                      "inside of tessera.GatheredParameters(model, modifier_rank=0)")
        name = _tag_of(tag)
        return (folder_of(load_dir, "load_dir"), name or "", *flags.values(), _groups_of(engine)), {"tag": name, **flags}

    taken, before = {}, []

    def not_taken_over(text, schedule_steps, lost):
        state = taken["state"] = _decoded(text)
        lines = [*(_without_lost_schedule(engine, state, schedule_steps, lost) if load_lr_scheduler_states else []),
                 *(_lost_options(engine, state, lost, load_lr_scheduler_states) if load_optimizer_states else [])]
        if load_lr_scheduler_states and engine._steps_lr_scheduler and _SCHEDULER_STATE in state:
            _give(engine.lr_scheduler, state, _SCHEDULER_STATE, before)
        if _LOADER_STATE in state and hasattr(engine.training_dataloader, "load_state_dict"):
            _give(engine.training_dataloader, state, _LOADER_STATE, before)
        return lines

    arguments_of_all = comm.agreed("load_checkpoint()", prepare)
    try:
        path, text, not_loaded, saved_by = engine._engine.load_checkpoint(*arguments_of_all, not_taken_over)
    except BaseException:
        _give_back(before)
        raise
    state = taken.get("state") or _decoded(text)
    if saved_by:
        _warn(engine, f"load_checkpoint(): {path} is a checkpoint of {saved_by}" + (f"; not taken over: {_listed(not_loaded)}" if not_loaded else ""))
    elif not_loaded:
        _warn(engine, f"load_checkpoint({'' if load_module_strict else 'load_module_strict=False'}): {path}; not taken over: {_listed(not_loaded)}")
    if not load_module_only:
        _load_python_state(engine, path, state, load_optimizer_states, load_lr_scheduler_states)
        if not saved_by and load_lr_scheduler_states and _SCHEDULER_STATE in state and engine.lr_scheduler is not None and not engine._steps_lr_scheduler:
            _warn(engine, f"load_checkpoint(): {path} has the state of a scheduler of initialize(lr_scheduler=), which is not taken over: the "
                          "configuration's schedule sets the rates")
    engine.optimizer.pull()
    engine._module_state.finish_load()
    return path, state["client_state"]


def _give(target, state, key, before):
    """Loads a part of a checkpoint's state into a scheduler or loader, and notes its own in `before`. Raises CheckpointError that names it."""
    try:
        own = copy.deepcopy(target.state_dict())
    except Exception:  # it has none, or none yet
        own = None
    before.append((target, own))
    try:
        target.load_state_dict(state[key])
    except Exception as error:
        raise CheckpointError(f"{_name_of(key).removesuffix('.state_dict()')}.load_state_dict(): {failures.describe(error)}") from error


def _give_back(before):
    """Nothing was loaded: schedulers and loaders go on where they were."""
    for target, own in before:
        try:
            target.load_state_dict(own)
        except Exception as error:
            _engine.log_warning(f"load_checkpoint(): {type(target).__name__} does not take its own state back, and is neither old nor new: make it "
                                f"anew ({failures.describe(error)})")


def _groups_of(engine):
    """The names of the parameters in the optimizer's groups, as torch numbers them; none of an engine without one. Raises Error where a tensor in
    a group is not the model's."""
    if engine.optimizer is None:
        return []
    names = first_names(engine.named_tensors)
    for number, group in enumerate(engine.optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in names:
                raise Error(f"optimizer.param_groups[{number}] has a tensor of shape {list(p.shape)} that is not a parameter of the engine's model; "
                            "expected the parameters that it had after initialize()")
    return [[names[id(p)] for p in group["params"]] for group in engine.optimizer.param_groups]


def folder_of(value: Any, name: str) -> str:
    """A folder that is an argument: str or PathLike. Raises ValueError or TypeError that names it."""
    if value is None or value == "":
        raise ValueError(f"{name} is {value!r}; expected a folder, a str or Path that is not empty")
    return arguments.path(value, name)


def _tag_of(tag):
    """The folder's name; None: none was given. Numbers are as `str` writes them, so that 0 is "0"."""
    if tag is None:
        return None
    if isinstance(tag, os.PathLike):
        tag = os.fspath(tag)
    if not isinstance(tag, (str, numbers.Number)) or isinstance(tag, bool):
        raise TypeError(f"tag is {tag!r:.60}, of type {type(tag).__name__}; expected a str, a number or None")
    name = str(tag)
    if name == "":
        raise ValueError("tag is ''; expected a folder's name, or None for the default")
    return arguments.path(name, "tag")


def _name_of(key):
    return {_SCHEDULER_STATE: "lr_scheduler.state_dict()", _LOADER_STATE: "training_dataloader.state_dict()",
            _GROUPS_STATE: "optimizer.param_groups"}.get(key, key)


def _decoded(text):
    state = json.loads(text)
    if not isinstance(state, dict) or "client_state" not in state:  # saved from C++
        return {"client_state": state}
    return {key: json_values.decode(value) for key, value in state.items()} if _ENCODING in state else state


def _is_torchs(scheduler):
    return type(scheduler).__module__ == torch.optim.lr_scheduler.__name__


def _without_lost_schedule(engine, state, steps, lost):
    """Makes of the saved state of a scheduler in `state` what the engine's takes over, or takes it out. Returns why it is not whole, a line
    each. `steps`: the updates that another program's schedule has counted; None: the checkpoint is Tessera's own."""
    unread = [line for of_schedule, _, line in lost if of_schedule]
    if engine.lr_scheduler is None:  # the loop steps its own
        return []
    if not engine._steps_lr_scheduler or _SCHEDULER_STATE not in state:
        return unread
    scheduler = engine.lr_scheduler
    kind, own = type(scheduler).__name__, scheduler.state_dict()
    if steps is None and not _is_torchs(scheduler):  # what its own class has saved
        return unread
    saved, missing = _with_own(state[_SCHEDULER_STATE], own, bool(unread))
    other_lengths = _other_lengths(saved, own)
    if steps is None:  # a program, or another version of torch, may have added attributes to the same class
        missing, saved_kind = other_lengths, state.get(_SCHEDULER_CLASS, kind)
        what = f"it is of {saved_kind}" if saved_kind != kind else ""
    else:
        missing = [*other_lengths, *missing]
        others = [key for key in saved if key not in own and key not in _OF_SOME_VERSIONS] if _is_torchs(scheduler) and isinstance(saved, dict) else []
        what = f"it has {', '.join(map(str, others[:3]))}" if others else ""
    if not isinstance(saved, dict) or what or (missing and not unread):
        what = what or (f"it has no {missing[0]}" if missing else "it is no dict")
        del state[_SCHEDULER_STATE]
        return [*unread, f"lr_scheduler: the state of another scheduler than {kind}: {what}"]
    found = saved.get("last_epoch", steps)
    if steps is not None and not needs_arguments(scheduler) and found != steps:
        del state[_SCHEDULER_STATE]
        return [*unread, f"lr_scheduler: it is at {found!r:.60}; expected {steps}, a step with each update"]
    state[_SCHEDULER_STATE] = saved
    return unread if missing else []


def _other_lengths(saved, own, path=""):
    """The lists by place that have another length in a saved state, as "base_lrs of 2, but of 1"."""
    found = []
    for key in _BY_PLACE:
        theirs, ours = (state.get(key) if isinstance(state, dict) else None for state in (saved, own))
        if not isinstance(theirs, list) or not isinstance(ours, list):
            continue
        if len(theirs) != len(ours):
            found.append(f"{path}{key} of {len(ours)}, but of {len(theirs)}")
        for i, pair in enumerate(zip(theirs, ours)):
            found += _other_lengths(*pair, f"{path}{key}[{i}].")
    return found


def _with_own(saved, own, deep, path=""):
    """A saved state with the values of `own` where it has none, and their names. Inside of other values than schedulers' states it is looked at
    where `deep`. Keys of dicts are numbers where its own have such: torch.distributed.checkpoint makes texts of those, as of MultiStepLR's
    milestones."""
    if isinstance(own, list) and isinstance(saved, list) and len(own) == len(saved):
        pairs = [_with_own(value, like, deep, f"{path}[{i}].") for i, (value, like) in enumerate(zip(saved, own))]
        return [value for value, _ in pairs], [name for _, names in pairs for name in names]
    if not isinstance(own, dict) or not isinstance(saved, dict):
        return saved, []
    if own and all(type(key) is int for key in own):
        by_text = type(saved) is dict and all(str(key).isdecimal() for key in saved)
        return type(own)({int(key): value for key, value in saved.items()}) if by_text else saved, []
    missing = [path + str(key) for key in own if key not in saved and key not in _OF_SOME_VERSIONS]
    merged = type(saved)(own if missing else ())
    for key, value in saved.items():
        like = own.get(key)
        of_numbers = isinstance(like, dict) and like and all(type(one) is int for one in like)
        merged[key], names = _with_own(value, like, deep, f"{path}{key}") if deep or of_numbers or key == "_schedulers" else (value, [])
        missing += names
    return merged, missing


def _lost_options(engine, state, lost, with_schedule):
    """What of param groups cannot be taken over, a line each."""
    own = engine.optimizer.values()
    known = {key for group in own for key in group}
    if engine.lr_scheduler is not None and (not with_schedule or not engine._steps_lr_scheduler or _rates_of(state, len(engine.optimizer.param_groups))):
        known -= {"lr", "initial_lr"}  # a schedule's, which has them or is asked to stay
    return [line for of_schedule, name, line in lost if not of_schedule and (not name or name in known)]


def _rates_of(state, count):
    """The rates that a saved scheduler has set last, of as many groups; else none."""
    saved = state.get(_SCHEDULER_STATE)
    rates = saved.get("_last_lr") if isinstance(saved, dict) else None
    are_numbers = isinstance(rates, list) and all(isinstance(rate, numbers.Real) for rate in rates)
    return rates if are_numbers and len(rates) == count else []


def _load_python_state(engine, path, state, with_optimizer, with_schedule):
    optimizer, steps_own = engine.optimizer, with_schedule and engine._steps_lr_scheduler
    has_schedule = _SCHEDULER_STATE in state
    if with_optimizer or (steps_own and has_schedule):
        # A rate is its schedule's, and goes with it; without a schedule of the engine's it is the optimizer's.
        with_rates = engine.lr_scheduler is None or (with_schedule and (has_schedule or not engine._steps_lr_scheduler))
        of_schedule = _OF_SCHEDULES | ({"momentum", "betas"} if getattr(engine.lr_scheduler, "cycle_momentum", False) else set())
        saved = state.get(_GROUPS_STATE, [])
        groups = [{key: value for key, value in (group or {}).items() if (with_rates if key in of_schedule else with_optimizer)} for group in saved]
        if steps_own:  # of a checkpoint that has them nowhere else
            groups = [{"lr": rate, **group} for group, rate in zip(groups, _rates_of(state, len(groups)))] or groups
        groups = [values for values, group in zip(groups, saved) if group is not None]  # None: of another program, without parameters
        own = len(optimizer.values())
        if len(groups) == own:
            optimizer.load_values(groups)
        elif groups:
            _warn(engine, f"load_checkpoint(): {path}: param groups: the checkpoint has {len(groups)}, and the optimizer {own}, so that its rates "
                          "and other values stay")
    if steps_own and not has_schedule:
        _warn(engine, f"{path} has no state of a scheduler that is taken over: the one of initialize(lr_scheduler=) goes on where it is")
    engine._set_global_samples(state.get(_SAMPLES, engine.global_steps * engine.train_batch_size()))
    if engine._reports is not None:
        engine._reports.resumed(engine.global_samples)


def _listed(lines):
    more = len(lines) - _MAX_LISTED
    return "; ".join(lines[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")


def _warn(engine, line):
    if engine.global_rank == 0:
        _engine.log_warning(line)

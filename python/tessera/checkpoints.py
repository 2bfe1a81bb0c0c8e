"""`Engine.save_checkpoint` and `load_checkpoint`: their arguments, and what Python has in a checkpoint beside the engine's state."""
import json
import numbers
import os
from collections.abc import Callable
from typing import Any

from tessera import _engine, arguments, comm, json_values
from tessera.optimizer_groups import first_names

# Keys of the client state of a checkpoint that are the package's own.
_GROUPS_STATE = "tessera.param_groups"
_SCHEDULER_STATE = "tessera.lr_scheduler"
_LOADER_STATE = "tessera.dataloader"
_SAMPLES = "tessera.global_samples"
_ENCODING = "tessera.encoding"  # 1: values are encoded by json_values.py; absent: they are plain JSON

_MAX_LISTED = 20


def save(engine: Any, save_dir: Any, tag: Any, state: Any, save_latest: bool, exclude_frozen_parameters: bool) -> str:
    """See `Engine.save_checkpoint`."""
    def prepare():
        engine._engine.check_usable()
        values = {"client_state": {} if state is None else state, _GROUPS_STATE: json_values.encodable(engine.optimizer.values()),
                  _SAMPLES: engine.global_samples, _ENCODING: 1}
        if engine._steps_lr_scheduler:
            values[_SCHEDULER_STATE] = engine.lr_scheduler.state_dict()
        if hasattr(engine.training_dataloader, "state_dict"):
            values[_LOADER_STATE] = engine.training_dataloader.state_dict()
        encoded = {key: json_values.encode(value, _name_of(key)) for key, value in values.items()}
        folder, name = folder_of(save_dir, "save_dir"), _tag_of(tag)
        flags = [arguments.flag(save_latest, "save_latest"), arguments.flag(exclude_frozen_parameters, "exclude_frozen_parameters")]
        return (folder, name or "", json.dumps(encoded, allow_nan=False), *flags), {"tag": name}

    return engine._engine.save_checkpoint(*comm.agreed("save_checkpoint()", prepare))


def load(engine: Any, load_dir: Any, tag: Any, load_module_strict: bool, load_optimizer_states: bool, load_lr_scheduler_states: bool,
         load_module_only: bool, custom_load_fn: Callable[..., Any] | None) -> tuple[str, Any]:
    """See `Engine.load_checkpoint`."""
    def prepare():
        given = {"load_module_strict": load_module_strict, "load_optimizer_states": load_optimizer_states,
                 "load_lr_scheduler_states": load_lr_scheduler_states, "load_module_only": load_module_only}
        flags = {name: arguments.flag(value, name) for name, value in given.items()}
        if custom_load_fn is not None:
            raise NotImplementedError("custom_load_fn: parameters are read from the shards of a checkpoint, and no state_dict of all is made; "
                                      "expected None. `tessera consolidate` writes that state_dict to a file, from which parameters can be set "
                                      "inside of tessera.GatheredParameters(model, modifier_rank=0)")
        name = _tag_of(tag)
        return (folder_of(load_dir, "load_dir"), name or "", *flags.values()), {"tag": name, **flags}

    path, text, not_loaded, saved_by = engine._engine.load_checkpoint(*comm.agreed("load_checkpoint()", prepare), _groups_of(engine))
    engine._count_again()
    state = _decoded(text)
    if saved_by:
        _warn(engine, f"load_checkpoint(): {path} is a checkpoint of {saved_by}" + (f"; not taken over: {_listed(not_loaded)}" if not_loaded else ""))
    elif not_loaded:
        _warn(engine, f"load_checkpoint(load_module_strict=False): {path}: {_listed(not_loaded)}")
    if not load_module_only:
        if saved_by and load_lr_scheduler_states and _SCHEDULER_STATE in state and engine._steps_lr_scheduler:
            _check_schedule(engine, path, state)
        _load_python_state(engine, path, state, load_optimizer_states, load_lr_scheduler_states)
    engine.optimizer.pull()
    engine._module_state.finish_load()
    return path, state["client_state"]


def _groups_of(engine):
    """The names of the parameters in the optimizer's groups, as torch numbers them; none of an engine without one."""
    if engine.optimizer is None:
        return []
    names = first_names(engine.named_tensors)
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


def _check_schedule(engine, path, state):
    """Takes the state of another program's scheduler out of `state`, if it is not one of this class."""
    own = engine.lr_scheduler.state_dict()
    saved = state[_SCHEDULER_STATE] = _with_keys_as(state[_SCHEDULER_STATE], own)
    if isinstance(saved, dict) and saved.keys() >= own.keys() - {"_get_lr_called_within_step", "_is_initial"} and \
            saved.get("last_epoch", engine._engine.schedule_steps) == engine._engine.schedule_steps:
        return
    del state[_SCHEDULER_STATE]
    _warn(engine, f"{path} has the state of another scheduler than {type(engine.lr_scheduler).__name__}, or of one that does not step with each "
                  f"update: expected its steps to be {engine._engine.schedule_steps}")


def _with_keys_as(saved, own):
    """The state of a scheduler, in which the keys of dicts are numbers where its own have such: torch.distributed.checkpoint makes texts of
    those, as of MultiStepLR's milestones."""
    if not isinstance(saved, dict):
        return saved

    def converted(value, like):
        is_other = isinstance(like, dict) and like and type(value) is dict and all(type(key) is int for key in like)
        return type(like)({int(key): item for key, item in value.items()}) if is_other and all(str(key).isdecimal() for key in value) else value

    return {key: converted(value, own.get(key)) for key, value in saved.items()}


def _load_python_state(engine, path, state, with_optimizer, with_schedule):
    optimizer = engine.optimizer
    if with_optimizer:
        with_rates = with_schedule or engine.lr_scheduler is None  # without a schedule of the engine's a rate is the optimizer's
        groups = [{key: value for key, value in group.items() if key != "lr" or with_rates} for group in state.get(_GROUPS_STATE, [])]
        if groups and len(groups) != len(optimizer.values()):
            _warn(engine, f"{path} has {len(groups)} param groups, and the optimizer {len(optimizer.values())}: their hyper-parameters stay")
        optimizer.load_values(groups)
    if with_schedule and engine._steps_lr_scheduler:
        if _SCHEDULER_STATE in state:
            engine.lr_scheduler.load_state_dict(state[_SCHEDULER_STATE])
        else:
            _warn(engine, f"{path} has no state of a scheduler: the one of initialize(lr_scheduler=) goes on where it is")
    if _LOADER_STATE in state and hasattr(engine.training_dataloader, "load_state_dict"):
        engine.training_dataloader.load_state_dict(state[_LOADER_STATE])
    engine._set_global_samples(state.get(_SAMPLES, engine.global_steps * engine.train_batch_size()))
    if engine._reports is not None:
        engine._reports.resumed(engine.global_samples)


def _listed(lines):
    more = len(lines) - _MAX_LISTED
    return "; ".join(lines[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")


def _warn(engine, line):
    if engine.global_rank == 0:
        _engine.log_warning(line)

"""`tessera.initialize`, with the signature of `deepspeed.initialize`."""
import functools
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tessera import _engine, arguments, comm, compiled_graphs, leaf_modules, module_state, optim, optimizer_groups, reports, whole_model, wrapper_tensors, zero
from tessera.data import DataLoader
from tessera.engine import Engine
from tessera.errors import CommError, ConfigError, Error
from tessera.lr_scheduler import check_scheduler, is_factory
from tessera.optimizer import Optimizer, release, schedule_cycles_momentum, to_override

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")  # torch's


def initialize(args: Any = None, model: torch.nn.Module | None = None,
               optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
               model_parameters: Iterable[Any] | None = None, training_data: torch.utils.data.Dataset | None = None,
               lr_scheduler: Any = None, distributed_port: int | None = None, mpu: None = None, dist_init_required: bool | None = None,
               collate_fn: Callable[[list], Any] | None = None, config: dict[str, Any] | str | Path | None = None,
               mesh_param: None = None, config_params: dict[str, Any] | str | Path | None = None,
               engine_class: type[Engine] = Engine, overrides: Sequence[str] = ()) -> tuple[Engine, Optimizer, DataLoader | None, Any]:
    """Make an engine that trains a model. Collective; it joins the group of ranks if that was not done.

    The model is used as before, through the engine or directly. Its parameters move into the engine's memory, with rank 0's
    values, and its floating parameters and buffers get the configuration's precision.

    After a call that failed because of its scheduler, model and optimizer can be given again; floating values then have the configuration's
    precision.

    Parameters
    ----------
    args : object, optional
        With an attribute `deepspeed_config` or `tessera_config`, in place of `config`. An attribute `local_rank` from 0 has to be this
        rank's.
    model : torch.nn.Module, or callable() that makes one
        Unmodified. All ranks build the same one. The whole model of a callable is never in memory: parameters get the same values as
        otherwise, unit by unit. The callable runs twice if its code reads values without an operator (`numpy()`, `tolist()`). The
        generators of torch, `random` and `numpy.random` then begin in the same state again; what it takes from other generators,
        iterators or files, it takes twice.
    optimizer : torch.optim.Optimizer, or callable(parameters) that makes one, optional
        In place of the section "optimizer". AdamW, Adam, SGD, Adagrad or RMSprop of torch.optim, Lion or LAMB, before the first step, is
        translated: the engine updates the parameters' shards. Any other runs as it is, on whole parameters, each on the rank that
        owns it. The returned optimizer has the same param groups; methods of the given one call those of the returned one from then
        on. Trainable parameters in none of its groups keep their values.
        Without an optimizer, a section and `model_parameters` it is AdamW with lr 0.001, and rank 0 logs that.
    model_parameters : iterable of Parameter, or of dicts with "params", optional
        Param groups for the optimizer of the configuration; other trainable parameters keep their values. Beside `optimizer` they may
        only repeat what its groups say.
    training_data : Dataset, optional
        Makes `training_dataloader`, a `tessera.DataLoader` over it with the configuration's batch size. Its length, and the configuration's
        `seed`, are the same on all ranks.
    lr_scheduler : torch.optim.lr_scheduler.LRScheduler, or callable(optimizer) that makes one, optional
        Drives the rates through the param groups; `engine.step()` steps it, and nobody else. In place of the section "scheduler".
        One that needs a metric (ReduceLROnPlateau) is stepped by the loop, with the same metric on all ranks.
    collate_fn : callable, optional
        Of the data loader; with `training_data` only.
    config : dict, str or Path
        What a ds_config.json holds, or the file (docs/configuration.md has every key).
    distributed_port : int, optional
        Port of the rendezvous, where the launcher has set no MASTER_PORT.
    mpu, mesh_param : None
        DeepSpeed's; anything else is refused.
    dist_init_required : bool, optional
        False: the group has to have been joined already. Otherwise it is joined where that was not done.
    config_params : dict, str or Path, optional
        An older name of `config`.
    engine_class : type
        Engine, or a class derived from it.
    overrides : sequence of str
        "KEY=VALUE" in place of what the configuration says, as behind `tessera train`: "zero_optimization.stage=2".

    Returns
    -------
    (Engine, Optimizer, DataLoader or None, scheduler or None)

    Raises
    ------
    ConfigError
        The configuration, model or optimizer cannot be used; a line for each error.
    CommError
        The ranks do not find each other, or differ in model or configuration.
    Error
        The ranks differ in the length of the training data or in its seed.
    TypeError, ValueError
        An argument of another type or range.

    Examples
    --------
    >>> engine, optimizer, _, _ = tessera.initialize(model=model, config={
    ...     "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}})
    """
    wrapper = next((one.__name__ for one in type(model).__mro__ if one.__name__ in _WRAPPERS and one.__module__.startswith("torch.")), None)
    if wrapper is not None:
        raise ConfigError(f"model is wrapped in {wrapper}, whose place the engine takes; expected the module itself, model.module")
    if not isinstance(model, torch.nn.Module) and (not callable(model) or isinstance(model, Engine)):
        raise ConfigError(f"model is {arguments.shown(model)}; expected a torch.nn.Module, or a callable that makes one")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise ConfigError(f"{name}: Tessera has data parallelism alone; expected None")
    if collate_fn is not None and training_data is None:
        raise ConfigError("collate_fn is given without training_data, whose samples it would collate; give both, or use it in a loader of yours")
    config = given_config(args, config, config_params)
    _join(args, distributed_port, dist_init_required)
    group = comm.group()
    deferred = None
    if not isinstance(model, torch.nn.Module):
        model, deferred = _make(model, group)
    named = module_state.named_parameters(model)
    for name, parameter in named:
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ConfigError(f"parameter {name} has no shape yet, as lazy modules have none before their first forward; run the model "
                              "once before initialize()")
        if wrapper_tensors.is_wrapper(parameter):
            raise ConfigError(f"parameter {name} is a {type(parameter).__name__}, a tensor that is made of others and has no memory of its own; "
                              "expected plain tensors: for quantized weights bitsandbytes' 4 bits, or a layer that keeps them as parameters of "
                              "their own type")
        if parameter.is_meta and deferred is None:
            raise ConfigError(f"parameter {name} is on the meta device and has no values; give initialize() a function that makes the model, "
                              "model=lambda: Net(…), and then engine.load_weights(path); or model.to_empty(device=…) with values of yours")
    if model_parameters is not None:
        model_parameters = _listed(model_parameters, optimizer, model)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model_parameters or [p for p in model.parameters() if p.requires_grad])
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer is a callable that made {arguments.shown(optimizer)}; expected an optimizer of torch.optim")
        model_parameters = None
    if isinstance(optimizer, torch.optim.Optimizer):
        release(optimizer)
    if lr_scheduler is not None:
        check_scheduler(lr_scheduler, [optimizer])
    overrides = arguments.texts(overrides, "overrides")
    parsed, translation = _parse(config, overrides, group, optimizer, model_parameters, lr_scheduler, named, engine_class.has_optimizer)
    resolved = json.loads(parsed.resolved)
    optimizer = translation.client or optimizer
    if translation.whole is not None and schedule_cycles_momentum(resolved):
        raise ConfigError(f"scheduler: OneCycle with cycle_momentum changes the betas of Adam, and {translation.whole.name} runs as it is; "
                          "expected cycle_momentum false, or a scheduler of torch as lr_scheduler")
    if not engine_class.has_optimizer:
        translation.untrained = [name for name, parameter in named if parameter.requires_grad]
    loader = comm.agreed("initialize()", lambda: _loader(training_data, resolved, collate_fn))
    steps_per_epoch = 0 if loader is None else loader.steps_per_epoch
    reports.meter_memory(parsed, group.device)
    more = {} if deferred is None else {"deferred": deferred}  # a class derived from Engine need not know them
    if translation.untrained:
        more["untrained"] = translation.untrained
    if translation.whole is not None:
        more["whole_optimizer"] = translation.whole
    number, labelled = zero.group_of_next_engine()
    engine = engine_class(model, parsed, labelled, comm.get_local_rank(), steps_per_epoch, **more)
    _warn_of_marks(engine, named)
    engine.training_dataloader = loader
    zero.register(engine, number)
    _attach_on_all_ranks(engine, optimizer, translation.groups, lr_scheduler)
    compiled_graphs.announce()
    _mark_leaf_modules(engine)
    if engine._engine.shards_parameters:
        whole_model.refuse_released()
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _make(make, group):
    """The module that `make` makes, without its parameters' values, and what computes these."""
    made = []
    calls = itertools.count()
    restore = _random_states()

    def make_it():  # the second time whole
        if next(calls) > 0:
            restore()
        made[:] = [make()]

    deferred = _engine.DeferredModel(warns=group.rank == 0)
    with zero.making():
        deferred.make(make_it)
    if not isinstance(made[0], torch.nn.Module):
        raise ConfigError(f"model is a callable that made {arguments.shown(made[0])}; expected a torch.nn.Module")
    return made[0], deferred


def _random_states():
    """What gives the generators of `random`, `numpy.random` and CUDA back the state that they have now. libtorch's on the CPU are restored
    by DeferredModel."""
    restores = [functools.partial(random.setstate, random.getstate())]
    if numpy_random := sys.modules.get("numpy.random"):
        restores.append(functools.partial(numpy_random.set_state, numpy_random.get_state(legacy=False)))
    if torch.cuda.is_initialized():
        restores.append(functools.partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))

    def restore():
        for one in restores:
            one()

    return restore


def _join(args, distributed_port, dist_init_required):
    torch_has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if dist_init_required is False and not comm.is_initialized() and not torch_has_group:
        raise CommError("dist_init_required=False, and this process has joined no group: call init_distributed() before, or leave it out")
    if distributed_port is not None:
        if not 0 < arguments.integer(distributed_port, "distributed_port", 0) < 65536:
            raise ConfigError(f"distributed_port is {distributed_port!r}; expected a port, 1 to 65535")
        if not os.environ.get("MASTER_PORT"):  # empty: unset
            os.environ["MASTER_PORT"] = str(distributed_port)
    local_rank = getattr(args, "local_rank", None)
    if isinstance(local_rank, int) and local_rank >= 0 and local_rank != comm.get_local_rank():
        raise ConfigError(f"args.local_rank is {local_rank} on the process whose LOCAL_RANK is {comm.get_local_rank()}; expected the same, or -1")


def _listed(model_parameters, optimizer, model):
    if isinstance(model_parameters, (str, bytes, torch.Tensor)) or not isinstance(model_parameters, Iterable):
        raise ConfigError(f"model_parameters is {arguments.shown(model_parameters)}; expected an iterable of Parameters, or of dicts with \"params\"")
    listed = list(model_parameters)
    if not listed and not isinstance(optimizer, torch.optim.Optimizer) and any(p.requires_grad for p in model.parameters()):
        raise ConfigError("model_parameters is empty, and the model has trainable parameters; expected some of them, or None for all (a "
                          "generator, such as model.parameters(), has its values once)")
    return listed


def _check_repeated(model_parameters, client, named):
    """`model_parameters` beside an optimizer: its groups count, and what is said here must not differ."""
    names = {id(parameter): name for name, parameter in named}
    group_of = {id(parameter): group for group in client.param_groups for parameter in group["params"]}
    for item in model_parameters:
        given = item if isinstance(item, dict) else {"params": [item[1] if isinstance(item, tuple) else item]}
        tensors = [given["params"]] if isinstance(given["params"], torch.Tensor) else given["params"]
        for parameter in tensors:
            if id(parameter) not in names:
                raise ConfigError(f"model_parameters has a tensor of shape {list(parameter.shape)} that is not a parameter of the model")
            group = group_of.get(id(parameter), {})
            for key, value in given.items():
                if key not in ("params", "name", "param_names") and (key not in group or group[key] != value):
                    raise ConfigError(f"model_parameters gives {names[id(parameter)]} {key}={value!r}, and the optimizer {group.get(key)!r}: the "
                                      "optimizer's param groups count; expected the same there")


def given_config(args: Any, config: Any, config_params: Any) -> dict[str, Any] | str:
    """The one of the three that `initialize` was given: a dict, or a path. Raises ConfigError where it is none or several."""
    from_args = getattr(args, "tessera_config", None) or getattr(args, "deepspeed_config", None)
    given = [value for value in (config, config_params, from_args) if value is not None]
    if len(given) != 1:
        raise ConfigError(f"{'no config was' if not given else 'several configs were'} given; expected config=, a dict or the path "
                          "of a ds_config.json")
    if not isinstance(given[0], (dict, str, Path)):
        raise ConfigError(f"config is {arguments.shown(given[0])}; expected a dict or the path of a ds_config.json")
    return given[0] if isinstance(given[0], dict) else arguments.path(given[0], "config")


def _parse(config, overrides, group, client, model_parameters, lr_scheduler, named, trains):
    """The configuration with what Python objects say in place of its sections, and what they were translated to."""
    sources, overrides = ["overrides="] if overrides else [], list(overrides)
    if lr_scheduler is not None:
        overrides.append(to_override("scheduler", {}))
    is_file = not isinstance(config, dict)
    text = config if is_file else json_of(config)
    translation = optimizer_groups.Translation()
    if isinstance(client, torch.optim.Optimizer):
        if model_parameters is not None:
            _check_repeated(model_parameters, client, named)
        translation = optimizer_groups.translate(client, named, group.size)
    elif client is not None:
        raise ConfigError(f"optimizer is {arguments.shown(client)}; expected an optimizer of torch.optim, or a callable that makes one")
    elif model_parameters is not None or any(hasattr(parameter, "use_muon") for _, parameter in named):
        alone = [*overrides, to_override("scheduler", {})]  # whose lists have a value for each of the groups
        resolved = json.loads(_engine.read_config(text, is_file, group.size, alone)[0].resolved)
        translation = optimizer_groups.translate_groups(model_parameters, named, resolved["optimizer"])
    if translation.section is not None:
        overrides.append(to_override("optimizer", translation.section))
        sources.append("model_parameters=" if client is None else "optimizer=")
    parsed, warnings, given = _engine.read_config(text, is_file, group.size, overrides, " or ".join(sources))
    if translation.untrained:
        warnings.append(f"{len(translation.untrained)} trainable parameters are in no param group of the optimizer and keep their values: "
                        + ", ".join(translation.untrained[:3]) + (", …" if len(translation.untrained) > 3 else ""))
    section = json.loads(parsed.resolved)["optimizer"]
    if translation.whole is None and section["type"] in optim.WHOLE and len(translation.untrained) < sum(p.requires_grad for _, p in named):
        translation.add_whole(parsed, section, named, group.size)
    if group.rank == 0 and client is None and "optimizer" not in given and trains and any(p.requires_grad for _, p in named):
        _engine.log_info(f"no optimizer was given: {section['type']} with lr {section['params']['lr']} updates all that is trainable; optimizer=, or "
                         "the section \"optimizer\" in the configuration, says otherwise")
    if translation.whole is not None:
        translation.whole.agree()
        warnings.extend(translation.whole.warnings())
    if group.rank == 0:
        for line in warnings:
            _engine.log_warning(line)
    return parsed, translation


def _loader(training_data, resolved, collate_fn):
    """For `comm.agreed`: the loader, and what decides the order of its samples. Without data ranks may have other seeds."""
    if training_data is None:
        return None, {"len(training_data)": None, "seed": None}
    seed = resolved.get("seed", 42)
    loader = DataLoader(training_data, resolved["train_micro_batch_size_per_gpu"], accumulation_steps=resolved["gradient_accumulation_steps"],
                        seed=seed, collate_fn=collate_fn)
    return loader, {"len(training_data)": len(training_data), "seed": seed}


def _warn_of_marks(engine, named):
    """`use_muon=True` of a parameter, as in DeepSpeed, makes no matrix of what is none."""
    by_muon = engine._engine.muon_parameters
    if not by_muon or engine.global_rank != 0:
        return
    first = module_state.first_names(named)
    others = sorted({first[id(parameter)] for _, parameter in named if getattr(parameter, "use_muon", False) and parameter.requires_grad}
                    - set(by_muon))
    if others:
        _engine.log_warning(f"{len(others)} parameters have use_muon=True, and AdamW updates them, because they are vectors or by their names "
                            f"embeddings or output layers: {', '.join(others[:3])}" + (", …" if len(others) > 3 else ""))


def _mark_leaf_modules(engine):
    wanted = {key: values or () for key, values in engine.config["zero_optimization"]["leaf_module"].items()}
    found = leaf_modules.matching(engine.module, wanted["classes"], wanted["names"], wanted["name_suffixes"])
    if any(wanted.values()) and not found and engine.global_rank == 0:
        _engine.log_warning("zero_optimization.leaf_module: no module of the model has one of these classes or names")
    for module in found:
        setattr(module, leaf_modules.MARK, True)
    leaf_modules.attach(engine.module)


def json_of(config: dict[str, Any]) -> str:
    """A configuration as a text. Raises ConfigError for what JSON does not have."""
    try:
        return json.dumps(config, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        try:
            found = _not_of_json(config, "")
        except RecursionError:  # it contains itself
            found = ""
        raise ConfigError(f"config: {found or error}; expected what JSON has") from error


def _not_of_json(value, path):
    """The first value of a config that JSON does not have, with its key; "" without one."""
    if isinstance(value, dict):
        return next(filter(None, (_not_of_json(item, f"{path}.{key}" if path else str(key)) for key, item in value.items())), "")
    if isinstance(value, (list, tuple)):
        return next(filter(None, (_not_of_json(item, f"{path}[{i}]") for i, item in enumerate(value))), "")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return f"{path} is {arguments.shown(value)}"
    return ""


def _attach_on_all_ranks(engine, client, groups, lr_scheduler):
    """Where it fails on a rank, all give model and optimizer back, so that they can be initialized again."""
    error = None
    try:
        _attach(engine, client, groups, lr_scheduler)
    except Exception as raised:
        error = raised
    by_rank = comm.all_gather(None if error is None else f"{type(error).__name__}: {error}".splitlines()[0], "optimizer and scheduler")
    failed = [rank for rank, text in enumerate(by_rank) if text is not None]
    if failed:
        engine.destroy()
        raise error or Error(f"initialize(): rank {failed[0]}: {by_rank[failed[0]]}")


def _attach(engine, client, groups, lr_scheduler):
    begun = optimizer_groups.states_of(client) if client is not None and engine._whole_optimizer is None else None
    engine.optimizer = engine.optimizer_class(engine, client, groups)
    if begun is not None:
        engine.optimizer.load_state_dict(begun)
    if lr_scheduler is not None:
        scheduler = lr_scheduler
        if is_factory(scheduler):
            scheduler = scheduler(engine.optimizer)
            check_scheduler(scheduler, [client, engine.optimizer])
        engine.attach_scheduler(scheduler)
    elif engine.config.get("scheduler", {}).get("type"):
        engine.lr_scheduler = engine.scheduler_class(engine)
        engine.optimizer.pull()  # the rate of the first step


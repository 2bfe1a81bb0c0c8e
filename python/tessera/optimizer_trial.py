"""Tries out on small parameters what an optimizer does that its class does not say: whether the update of a parameter depends on others, and
what of it changes that a checkpoint does not have."""
import copy
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tessera import json_values
from tessera.containers import is_plain_object
from tessera.errors import ConfigError, Error
from tessera.optimizer_options import is_option

_MAX_SIZE = 8  # of the small parameters, in each dimension
_SCALES = (1.0, 1e-4, 1.0, 1e2, 1e5)  # of the gradients, by step: some clip, or leave out a step, by a norm
_MIN_LR = 1e-2  # a schedule may begin with a rate that changes no bit
_MOST = 24  # small parameters: each is tried alone, too


@dataclass(frozen=True)
class Trial:
    """What has been found.

    Attributes
    ----------
    depends : str
        Why an update of a parameter depends on others, or on how often step() is called; "": it does not.
    attributes : list of str
        Names of the optimizer's attributes that step() changes and that can be saved.
    unsaved : str
        What else changes in a step, so that no checkpoint has it; "": nothing that is known.
    unsaved_state : str
        Why the states of its parameters cannot be saved, behind "it has"; "": they can.
    states : dict of int to set of str
        The names of a parameter's states by its number of dimensions; none for one that was not tried out.
    """

    depends: str
    attributes: list[str]
    unsaved: str
    unsaved_state: str
    states: dict[int, set[str]]


class NoCollectives(TorchDispatchMode):
    """Inside of it a collective of torch.distributed raises: each rank has other parameters there, or none."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What step() compiles, as torchao's does, is compiled as without this mode, which sees the operators that the compiled code calls."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Of any operator."""
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise _Collective(f"{self._name} calls torch.distributed ({func.__name__}) in step(), where each rank has the parameters that it owns; "
                              "expected an optimizer for one process, such as muon.SingleDeviceMuon")
        return func(*args, **(kwargs or {}))


class _Collective(ConfigError):
    """What NoCollectives raises."""


class _Replaced(ConfigError):
    """step() gives parameters other memory."""


def try_out(client: torch.optim.Optimizer, name: str, model: Iterable[torch.Tensor] = ()) -> Trial:
    """Let copies of an optimizer update small parameters of the same kinds, all at once and each alone: all bits have to be equal.

    So have numbers and tensors that it keeps in groups and attributes. Some gradients are None in a second round. Optimizers with
    statistics over all parameters (prodigy's, a norm that clips), noise from a generator, or counters are found so, and one that the trial
    cannot be made with is taken for such. What shows neither on small parameters nor in a few steps is not found. Generators are as before.
    `model`: its parameters, which a module that the optimizer keeps may have, too.

    Raises
    ------
    ConfigError
        It calls collectives, or gives a parameter other memory.
    """
    originals = _originals(client)
    rounds: list[tuple[int, ...]] = [(), tuple(range(len(originals)))]
    depends, attributes, unsaved, unsaved_state = "", set(), "", ""
    states: dict[int, set[str]] = {}
    with _without_a_trace(client, name, model), NoCollectives(name):
        for round_, without in enumerate(rounds):
            try:
                together = _run(client, originals, range(len(originals)), without)
                attributes |= set(together.attributes)
                unsaved, unsaved_state = unsaved or together.unsaved, unsaved_state or together.unsaved_state
                states = states or {parameter.dim(): names for parameter, names in zip(originals, together.states)}
                depends = depends or _difference(client, originals, together, without)
            except (_Collective, _Replaced):
                raise
            except Exception as error:
                if round_ == 0:  # else it cannot do without gradients at all
                    depends = f"a trial on small parameters failed ({type(error).__name__}: {error})".splitlines()[0][:300]
                    unsaved = "attributes that step() may change, as the trial failed"
                break
    if type(client).state_dict is not torch.optim.Optimizer.state_dict and not attributes and not unsaved:
        unsaved = "what its own state_dict() adds, which is not called"
    return Trial(depends, sorted(attributes), unsaved, unsaved_state, states)


def is_replaced(client: torch.optim.Optimizer) -> bool:
    """Whether the optimizer, or its class, has another step() than its package gave it; torch's schedulers put one around it."""
    step = _plain_step(type(client))
    return _step_of(client) is not step or _home_of(_without_decorators_of_torch(step)) != package_of(client)


def lists_by_parameter(group: Mapping[str, Any]) -> list[str]:
    """Keys of a group with an element for each parameter: "params", "param_names" and the like, but no option as `betas`."""
    return [key for key, value in group.items()
            if key == "params" or (type(value) is list and len(value) == len(group["params"]) and not is_option(key))]


def _originals(client):
    groups = [some for group in client.param_groups if (some := _some_of([p for p in group["params"] if p.requires_grad]))]
    if sum(len(some) for some in groups) <= _MOST:
        return [parameter for some in groups for parameter in some]
    groups = [groups[i * len(groups) // min(len(groups), _MOST)] for i in range(min(len(groups), _MOST))]
    share = _MOST // len(groups)
    return [parameter for some in groups for parameter in (some if len(some) <= share else some[:share - share // 2] + some[len(some) - share // 2:])]


@contextmanager
def _without_a_trace(client, name, model):
    """Small parameters are on the CPU inside of it. Generators, and tensors of modules that the optimizer has, are then as before.

    Raises
    ------
    ConfigError
        The parameters themselves were written, as their first elements show.
    """
    generators = [(random.getstate, random.setstate), (torch.get_rng_state, torch.set_rng_state)]
    if numpy := sys.modules.get("numpy.random"):
        generators.append((lambda: numpy.get_state(legacy=False), numpy.set_state))
    before = [get() for get, _ in generators]
    parameters = {id(p): p for p in (*model, *(p for group in client.param_groups for p in group["params"])) if not p.is_meta}
    samples = {key: _first_elements(p).clone() for key, p in parameters.items()}
    modules = [value for value in vars(client).values() if isinstance(value, torch.nn.Module)]
    others = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers()) if id(t) not in parameters and not t.is_meta}
    copies = {key: t.detach().clone() for key, t in others.items()}
    try:
        with torch.device("cpu"):  # whatever the user's default is
            yield
    finally:
        for (_, put), state in zip(generators, before):
            put(state)
        with torch.no_grad():
            for key, kept in copies.items():
                if not torch.equal(others[key], kept):
                    others[key].copy_(kept)
    if not all(torch.allclose(_first_elements(parameters[key]), kept, rtol=0, atol=0, equal_nan=True) for key, kept in samples.items()):
        raise ConfigError(f"{name}: step() writes the model's parameters past param_groups, by a function or object that it keeps, and a trial of it "
                          "on small parameters has changed the model; expected one that updates the parameters in its param_groups, and a model that "
                          "is made anew")


def _first_elements(parameter):
    return parameter.detach().reshape(-1)[:64]


def _plain_step(kind):
    """The step() of a class, without the hooks that torch puts around it."""
    step = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") and _home_of(step) == "torch" else step


def _home_of(function):
    """The package whose code it is; functools.wraps gives a wrapper the module of what it wraps."""
    return getattr(function, "__globals__", {}).get("__name__", "").split(".")[0]


def _without_decorators_of_torch(step):
    """What is inside of `torch.no_grad()` and the like."""
    while _home_of(step) == "torch" and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def _step_of(client):
    """What is called with the optimizer, or a copy of it."""
    own = vars(client).get("step")
    if getattr(own, "_wrapped_by_lr_sched", False):
        own = own.__wrapped__
    if isinstance(own, types.MethodType) and own.__self__ is client:
        own = own.__func__
    return _plain_step(type(client)) if own is None or own is type(client).step else own


def _difference(client, originals, together, without):
    if together.draws:
        return "step() draws random numbers"
    for i, original in enumerate(originals):
        alone = _run(client, originals, [i], without)
        group = next(g for g, group in enumerate(client.param_groups) if any(p is original for p in group["params"]))
        if not torch.equal(alone.parameters[i], together.parameters[i]):
            return "the update of a parameter depends on the other parameters"
        if alone.changed[group] != together.changed[group] or alone.changed[-1] != together.changed[-1]:
            return "what it keeps in its groups or attributes depends on all parameters"
    if len(originals) > 1 and _run(client, originals, [], without).changed[:-1] != together.changed[:-1]:  # as on a rank that owns none
        return "what it keeps in its groups depends on whether it has parameters"
    return ""


@dataclass
class _Outcome:
    parameters: list[torch.Tensor]
    changed: list[dict[str, str]]  # of each group, and last of the attributes, as text
    draws: bool
    attributes: list[str]
    unsaved: str
    unsaved_state: str
    states: list[set[str]]  # names, of each parameter


def _some_of(parameters):
    """Of each number of dimensions the first four and the last four: neighbours, as an adapter's matrices are."""
    found = defaultdict(list)
    for parameter in parameters:
        found[parameter.dim()].append(parameter)
    chosen = {id(parameter) for several in found.values() for parameter in (*several[:4], *several[-4:])}
    return [parameter for parameter in parameters if id(parameter) in chosen]


def _like(parameter):
    return torch.nn.Parameter(torch.randn([min(size, _MAX_SIZE) for size in parameter.shape], dtype=torch.float32))


def _run(client, originals, members, without):
    """Some steps of a copy of the optimizer that has these `members` of the small parameters alone. `without`: those that lack some
    gradients."""
    torch.default_generator.manual_seed(0)
    small = [_like(parameter) for parameter in originals]
    gradients = [[torch.randn(parameter.shape, dtype=torch.float32) * 10.0 ** (i % 3) * scale for i, parameter in enumerate(small)] for scale in _SCALES]
    probe = _copy_of(client, originals, small, {id(originals[i]) for i in members})
    step = _step_of(client)
    if callable(getattr(probe, "train", None)):  # schedulefree's
        probe.train()
    begin, draws = _kept(probe), False
    for number, of_step in enumerate(gradients):
        random.seed(0)
        torch.default_generator.manual_seed(1 + number)
        before = torch.get_rng_state(), random.getstate(), _numpy_state()
        for i, (parameter, gradient) in enumerate(zip(small, of_step)):
            has_one = i in members and not (i in without and (number + i) % 3 == 1)
            parameter.grad = gradient.clone() if has_one else None
        memory = [parameter.untyped_storage().data_ptr() for parameter in small]
        step(probe)
        if memory != [parameter.untyped_storage().data_ptr() for parameter in small]:
            raise _Replaced(f"{type(client).__module__}.{type(client).__qualname__}: step() has replaced the memory of a parameter, as p.data = ... does; "
                            "expected parameters to be updated in place, as by p.copy_() or p.add_()")
        draws |= not torch.equal(before[0], torch.get_rng_state()) or before[1:] != (random.getstate(), _numpy_state())
    changed = [{key: value for key, value in now.items() if value != then.get(key)} for then, now in zip(begin, _kept(probe))]
    parameters = {id(parameter) for parameter in small}
    attributes = [name for name in changed[-1] if not _why_not_saved(probe, vars(probe)[name], parameters)]
    return _Outcome([parameter.detach() for parameter in small], changed, draws, attributes, _unsaved(probe, changed, set(attributes)),
                    _unsaved_state(probe, parameters), [{str(name) for name in probe.state.get(parameter, {})} for parameter in small])


def _copy_of(client, originals, small, chosen):
    """The optimizer with small parameters in the place of its own, of which its groups have those that are chosen, and what is frozen."""
    probe = object.__new__(type(client))
    memo: dict[int, Any] = {id(client): probe}
    for group in client.param_groups:  # those that are not tried out, where the optimizer refers to them elsewhere
        memo.update((id(p), _like(p)) for p in group["params"])
    for value in vars(client).values():
        if isinstance(value, torch.nn.Module):  # is not copied
            memo[id(value)] = value
    for original, parameter in zip(originals, small):
        memo[id(original)] = parameter
        for value in client.state.get(original, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == original.shape:
                memo[id(value)] = value.detach()[tuple(slice(0, size) for size in parameter.shape)].to("cpu", copy=True)
    probe.state = defaultdict(dict)
    probe.param_groups = [{} for _ in client.param_groups]
    # An optimizer inside of this one may share its states and groups.
    memo.update({id(client.state): probe.state, id(client.param_groups): probe.param_groups})
    memo.update((id(group), of_probe) for group, of_probe in zip(client.param_groups, probe.param_groups))
    for group, of_probe in zip(client.param_groups, probe.param_groups):
        indices = [i for i, p in enumerate(group["params"]) if id(p) in chosen or not p.requires_grad]
        by_parameter = lists_by_parameter(group)
        for key, value in group.items():
            of_probe[key] = copy.deepcopy([value[i] for i in indices] if key in by_parameter else value, memo)
        lr = of_probe.get("lr")
        if isinstance(lr, torch.Tensor) and lr.numel() == 1:
            lr.fill_(max(lr.item(), _MIN_LR))
        elif type(lr) in (int, float):
            of_probe["lr"] = max(lr, _MIN_LR)
    probe.state.update((memo[id(key)], copy.deepcopy(client.state[key], memo)) for key in originals if id(key) in chosen and key in client.state)
    probe.state.update((key, copy.deepcopy(value, memo)) for key, value in client.state.items() if not isinstance(key, torch.Tensor))
    kept = {key: value for key, value in vars(client).items() if key not in ("state", "param_groups", "step") and "_hooks" not in key}
    ids = {i: id(one) for i, one in memo.items() if isinstance(one, torch.nn.Parameter)}
    vars(probe).update({name: _with_ids(value, ids) for name, value in copy.deepcopy(kept, memo).items()})
    vars(probe).update({name: OrderedDict() for name in vars(client) if "_hooks" in name})
    for value in vars(probe).values():
        for one in value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]:
            if isinstance(one, torch.optim.Optimizer):  # torch's copy of one asks each group for "capturable" where there is a GPU
                one._warned_capturable_if_run_uncaptured = True
    return probe


def _with_ids(value, ids):
    """An attribute in which ids of parameters are those of the small ones."""
    if type(value) in (dict, defaultdict, OrderedDict) and any(key in ids for key in value if type(key) is int):
        changed = {ids.get(key, key) if type(key) is int else key: item for key, item in value.items()}
        value.clear()
        value.update(changed)
    elif type(value) in (list, tuple, set, frozenset) and any(item in ids for item in value if type(item) is int):
        value = type(value)(ids.get(item, item) if type(item) is int else item for item in value)
    return value


def _kept(probe):
    """What each group and last the attributes hold, as text by key, without parameters and their states."""
    attributes = {name: value for name, value in vars(probe).items()
                  if name not in ("state", "param_groups", "defaults") and not name.startswith(("_optimizer_", "_opt_called", "_warned"))
                  and not (isinstance(value, torch.optim.Optimizer) and value.state is probe.state)}
    return [{str(key): _text(value) for key, value in kept.items() if key != "params"} for kept in (*probe.param_groups, attributes)]


def _text(value, depth=0):
    """Numbers, texts and tensors in a value, so that NaN is equal to itself. Parameters, and what has no value to compare, are left out."""
    if isinstance(value, torch.nn.Parameter) or depth > 6:
        return ""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{value.tolist()}" if value.numel() <= 4096 else f"{value.dtype}{value.double().sum().item()!r}{list(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, dict):
        return str([(_text(key, depth + 1), _text(item, depth + 1)) for key, item in value.items()])
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return str([_text(item, depth + 1) for item in value])
    if isinstance(value, torch.optim.Optimizer):
        return str([_text(inner, depth + 1) for inner in value.state.values()])
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist()).hex()
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, (numpy.ndarray, numpy.generic)):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, (torch.nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)):
        return ""
    return f"{type(value).__qualname__}{_text(vars(value), depth + 1)}" if hasattr(value, "__dict__") else ""


def _has_parameters(value, parameters, depth=0):
    """Whether the value has parameters, or keys that are their ids: they are others after a checkpoint was loaded."""
    if isinstance(value, torch.nn.Parameter) or (isinstance(value, torch.Tensor) and id(value) in parameters):
        return True
    if depth > 6:
        return False
    if isinstance(value, dict):
        return any((type(key) is int and key in parameters) or _has_parameters(key, parameters, depth + 1) or
                   _has_parameters(item, parameters, depth + 1) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return any(_has_parameters(item, parameters, depth + 1) for item in value)
    return is_plain_object(value) and _has_parameters(vars(value), parameters, depth + 1)


def _unsaved(probe, changed, saved):
    parts = []
    for what, names in (("attribute", sorted(set(changed[-1]) - saved)),
                        ("option", sorted({key for group, keys in zip(probe.param_groups, changed) for key in keys
                                           if key in group and not json_values.can_encode(group[key])}))):
        if names:
            parts.append(f"the {what}{'s' if len(names) > 1 else ''} {', '.join(names)}, which step() changes")
    return "; ".join(parts)


def _unsaved_state(probe, parameters):
    for key, state in probe.state.items():
        of = "of a parameter" if isinstance(key, torch.Tensor) else f"of {key!r:.40}"
        for name, value in state.items() if isinstance(state, Mapping) else [("", state)]:
            if why := _why_not_saved(probe, value, parameters):
                return f"a state {of} that cannot be saved: {str(name) + ': ' if name else ''}{why}"
    return own_states_inside(probe, probe.state)


def _why_not_saved(probe, value, parameters):
    if _has_parameters(value, parameters):
        return "it has a parameter of the model in it, or the id of one, which are others when it is loaded"
    try:
        json_values.to_bytes({"it": value}, package_of(probe))
    except Error as error:
        return str(error)
    return ""


def package_of(client: torch.optim.Optimizer) -> str:
    """The package whose classes' objects a checkpoint may have of it: that of its class."""
    return type(client).__module__.split(".")[0]


def own_states_inside(client: torch.optim.Optimizer, states: Mapping[Any, Any]) -> str:
    """Names an optimizer inside of this one that has states of its own, and does not share `states`; "" without one."""
    for name, inner in vars(client).items():
        if isinstance(inner, torch.optim.Optimizer) and inner.state and inner.state is not states:
            return (f"an optimizer inside of it, self.{name}, that has states of its own, which nobody saves; expected it to share those of the "
                    f"outer one, self.{name}.state = self.state, at the beginning of step()")
    return ""


def _numpy_state():
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    state = numpy.get_state(legacy=False)
    return str((state["state"]["key"].tolist(), state["state"]["pos"]))

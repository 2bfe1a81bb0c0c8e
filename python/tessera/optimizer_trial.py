"""Tries out on small parameters what an optimizer does that its class does not say: whether the update of a parameter depends on others, and
what of it changes that a checkpoint does not have."""
import copy
import random
import sys
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tessera import json_values
from tessera.errors import ConfigError, Error

_MAX_SIZE = 8  # of the small parameters, in each dimension
_NUM_STEPS = 5
_MIN_LR = 1e-2  # a schedule may begin with a rate that changes no bit


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
    states : dict of int to set of str
        The names of a parameter's states by its number of dimensions; none for one that was not tried out.
    """

    depends: str
    attributes: list[str]
    unsaved: str
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


def try_out(client: torch.optim.Optimizer, name: str) -> Trial:
    """Let copies of an optimizer update small parameters of the same kinds, all at once and each alone: all bits have to be equal.

    So have numbers and tensors that it keeps in groups and attributes. Some gradients are None in a second round. Optimizers with
    statistics over all parameters (prodigy's, a norm that clips), noise from a generator, or counters are found so, and one that the trial
    cannot be made with is taken for such. What shows neither on small parameters nor in a few steps is not found. Generators are as before.

    Raises
    ------
    ConfigError
        It calls collectives.
    """
    originals = [parameter for group in client.param_groups for parameter in _of_two_shapes([p for p in group["params"] if p.requires_grad])]
    generators = [(random.getstate, random.setstate), (torch.get_rng_state, torch.set_rng_state)]
    if numpy := sys.modules.get("numpy.random"):
        generators.append((lambda: numpy.get_state(legacy=False), numpy.set_state))
    before = [get() for get, _ in generators]
    rounds: list[tuple[int, ...]] = [(), tuple(range(len(originals)))]
    depends, attributes, unsaved = "", set(), ""
    states: dict[int, set[str]] = {}
    try:
        with NoCollectives(name), torch.device("cpu"):  # where the small parameters are, whatever the user's default is
            for round_, without in enumerate(rounds):
                try:
                    together = _run(client, originals, range(len(originals)), without)
                    attributes |= set(together.attributes)
                    unsaved = unsaved or together.unsaved
                    states = states or {parameter.dim(): names for parameter, names in zip(originals, together.states)}
                    depends = depends or _difference(client, originals, together, without)
                except _Collective:
                    raise
                except Exception as error:
                    if round_ == 0:  # else it cannot do without gradients at all
                        depends = f"a trial on small parameters failed ({type(error).__name__}: {error})".splitlines()[0][:300]
                    break
    finally:
        for (_, put), state in zip(generators, before):
            put(state)
    if type(client).state_dict is not torch.optim.Optimizer.state_dict and not attributes and not unsaved:
        unsaved = "what its own state_dict() adds, which is not called"
    return Trial(depends, sorted(attributes), unsaved, states)


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
    if len(originals) > 1:
        _run(client, originals, [], without)  # as on a rank that owns none
    return ""


@dataclass
class _Outcome:
    parameters: list[torch.Tensor]
    changed: list[dict[str, str]]  # of each group, and last of the attributes, as text
    draws: bool
    attributes: list[str]
    unsaved: str
    states: list[set[str]]  # names, of each parameter


def _of_two_shapes(parameters):
    """Up to two parameters of each number of dimensions."""
    found = defaultdict(list)
    for parameter in parameters:
        if len(found[parameter.dim()]) < 2:
            found[parameter.dim()].append(parameter)
    return [parameter for several in found.values() for parameter in several]


def _like(parameter):
    return torch.nn.Parameter(torch.randn([min(size, _MAX_SIZE) for size in parameter.shape], dtype=torch.float32))


def _run(client, originals, members, without):
    """Some steps of a copy of the optimizer that has these `members` of the small parameters alone. `without`: those that lack some
    gradients."""
    torch.default_generator.manual_seed(0)
    small = [_like(parameter) for parameter in originals]
    gradients = [[torch.randn(parameter.shape, dtype=torch.float32) * 10.0 ** (i % 3) for i, parameter in enumerate(small)] for _ in range(_NUM_STEPS)]
    probe = _copy_of(client, originals, small, {id(originals[i]) for i in members})
    step = type(client).step
    step = step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") else step  # without the hooks of steps
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
        step(probe)
        draws |= not torch.equal(before[0], torch.get_rng_state()) or before[1:] != (random.getstate(), _numpy_state())
    changed = [{key: value for key, value in now.items() if value != then.get(key)} for then, now in zip(begin, _kept(probe))]
    attributes = [name for name in changed[-1] if not _why_not_saved(vars(probe)[name])]
    return _Outcome([parameter.detach() for parameter in small], changed, draws, attributes, _unsaved(probe, sorted(set(changed[-1]) - set(attributes))),
                    [{str(name) for name in probe.state.get(parameter, {})} for parameter in small])


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
        for key, value in group.items():
            by_parameter = type(value) is list and len(value) == len(group["params"])
            of_probe[key] = copy.deepcopy([value[i] for i in indices] if key == "params" or by_parameter else value, memo)
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
    if isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        return str([_text(item, depth + 1) for item in value])
    if isinstance(value, torch.optim.Optimizer):
        return str([_text(inner, depth + 1) for inner in value.state.values()])
    return ""


def _unsaved(probe, changed):
    parts = []
    if changed:
        parts.append(f"the attribute{'s' if len(changed) > 1 else ''} {', '.join(changed)}, which step() changes")
    if why := _why_not_saved({f"of a parameter, {i}": state for i, state in enumerate(probe.state.values())}):
        parts.append(f"a state that cannot be saved: {why}")
    return "; ".join(parts)


def _why_not_saved(value):
    try:
        json_values.to_bytes({"it": value})
    except Error as error:
        return str(error)
    return ""


def _numpy_state():
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    state = numpy.get_state(legacy=False)
    return str((state["state"]["key"].tolist(), state["state"]["pos"]))
